"""What the planner finds, how near to its bound, and in what time.

ablation       What each part of the planner brings
bruteforce     The planner's loop against brute force on 200 random instances
drives         13B on the Fuyou machine with 1 to 12 drives
eight_gpus     The planner beside the published systems on eight GPUs
grid           The planner against every published system on a grid of machines
monotone       Whether more of any resource ever gives a slower plan
packs          The planner against Harmony's own search on Harmony's own profiles
planning_time  How long the planner takes for GPT-3 175B
shards         What it is worth that optimizer states travel in shards
"""

from tierplan.planner.search import budget

budget.WALL_TIMES = 1000
"""Computing counts, not the clock: a busy computer writes the same table, only later."""
