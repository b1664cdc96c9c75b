"""What survives the run:

commits     committed steps: a run that dies goes on from the last one, if it is whole, byte by byte
snapshot    what is in memory at a commit, kept while the next steps run
durability  what a commit holds, from and to whatever tier
weights     weights in and out, one unit at a time
"""
