"""From a plan for one device to a schedule:

compute_order  which unit's forward or backward comes when
unitwise       the walk over that order: parameters, saved tensors, inputs
updates        gradients: adding up, clipping, the optimizer step and what moves for it
tiling         the same step in smaller pieces
contention     the list order where several devices contend
"""
