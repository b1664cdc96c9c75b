"""Questions that the planner answers by planning again:

largest    the largest model of a family that fits
what_if    what more memory, drives or links would be worth
endurance  how much may be written for the drives to last
"""
