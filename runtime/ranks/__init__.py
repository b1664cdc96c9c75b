"""Several processes that execute one schedule together, a device each.

group         the ranks: what they exchange, and how they end together
collectives   what gathers and reductions do
alike         what all ranks must be given alike, compared
launch        starts the ranks of a run
"""
