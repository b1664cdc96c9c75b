"""Systems whose devices divide the work, as policies:

zero             states, gradients, parameters divided among devices (ZeRO-1, 2, 3)
fsdp             PyTorch's own: DDP, FSDP2, FSDP2 with CPU offload
megatron         operators, or the chain of units, cut among devices (Megatron-LM)
roundpipe        packs of blocks dispatched to the devices round robin (RoundPipe)
mobius           stages in host memory, the same forward and backward (Mobius)
harmony          packs of units that visit the devices in turn (Harmony)
virtual_memory   weights paged in and out for every use: the baseline that Harmony beats
"""
