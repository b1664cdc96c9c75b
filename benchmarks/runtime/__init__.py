"""What the runtime's steps and commits take, alone and beside other systems.

checksums      What it costs that every byte on a drive is checked
commits        What a commit costs the steps beside which it is made
nvme_bound     How close a training step comes to its busiest stream
page           The figures in the runtime's page
peers          Steps of tierplan against steps of other systems on this machine
speed          How close the runtime comes to its busiest stream
"""
