"""The optimizer:

adam            the step of one flat buffer, with the bits of PyTorch's fused optimizers
groups          which parameters are treated how, and which are frozen
learning_rates  learning rates by step
"""
