"""The planning program, in the order in which it is built. docs/planner.md has its mathematics.

amounts     seconds and gigabytes of each unit
rates       how fast transfers and updates go at most
modes       placements that a unit may have
columns     decisions, durations and flows as columns
queues      what moves, as queues over windows of time
capacities  what binds: deadlines, memory, streams, shared limits
model       the program as a whole
program     a linear program as arrays, and HiGHS, which solves it
bounds      what no schedule can beat, and what an impossible problem lacks
totals      what no plan of any kind can beat, on all devices together
rounding    from shares to one placement and one action each
integral    the same decisions as integers, with a proven gap
"""
