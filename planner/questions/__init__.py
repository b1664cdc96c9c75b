"""Questions that the planner answers by planning again:

largest    the largest model of a family that fits
endurance  how much may be written for the drives to last
"""
