"""Questions that the planner answers by planning again:

largest    the largest model of a family that fits
frontier   the step time against device memory
endurance  how much may be written for the drives to last
"""
