"""The machine as it is inside a training step:

budgets  memory budgets for a plan, from roomy to tight
runs     calibration runs: a shallow model, trained under six plans in turns
fit      rates, contention and latencies, from those runs
"""
