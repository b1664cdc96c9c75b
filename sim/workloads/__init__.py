"""What is trained, as amounts, without torch:

workload  the record: units, their operations, parameters and saved tensors
work      amounts by kind; what several recomputations have in common; what is held for a while
adapters  what is added to a frozen model, as text
formats   how values lie in a tier: bits, blocks, scales
fused     what a fused loss and compiled blocks keep and move instead
models    from a config to a workload by closed forms, in milliseconds
executed  which settings are executed, and not only simulated
optimizers  what an optimizer keeps, and what its update costs
families  the closed forms, one file per family of models
"""
