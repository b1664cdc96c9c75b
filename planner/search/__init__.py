"""The search by simulation:

candidates  a candidate, its budget, and the descent from one to better ones
moves       small changes of a plan
knobs       what the program cannot decide, tuned one after the other
restarts    descents from random plans, on short chains
batches     the outer search over micro-batch size and accumulation
"""
