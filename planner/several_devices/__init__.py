"""Plans for several devices:

collectives  what devices do together, as work of a ring
sharded      the planning problem of one of several that divide all but their micro-batches
bounds       what no step of several is shorter than
tensors      operators that all share, with what their memory has room to keep
partition    one device's schedule on each of several, with states cut into shards (ZeRO-3)
dividing     its ops and buffers, compiled
kinds        what decides how a schedule is divided, as numbers in place of names
alike        one device for several that all do the same at once
packs        runs of units that visit devices in turn (Harmony), or stay on them as stages (Megatron)
paged        weights paged in and out for every use: the baseline that Harmony beats
"""
