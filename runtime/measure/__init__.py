"""How fast this machine is:

loads    one op of each stream, as training runs it
timing   loads alone and together
limits   which shared limits explain how much streams slow each other down
report   the measurement as a machine's description
machine  all of it: `tierplan machine measure`
units    how long each unit of a model takes here
reference_work  how fast the machine is while it trains
"""
