"""The optimizer:

kernels  the step of each optimizer, by its name
codes    moments in 8 and 4 bits
states   how a unit's states lie in memory, whole and in parts
adam     the step of one flat buffer, with the bits of PyTorch's own optimizers
groups   which parameters are treated how
"""
