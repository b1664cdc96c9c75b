"""What survives the run:

commits       committed steps: a run that dies goes on from the last one
snapshot      what is in memory at a commit, kept while the next steps run
durability    what a commit holds, from and to whatever tier
verification  whether a commit is whole, byte by byte
weights       weights in and out, one unit at a time
"""
