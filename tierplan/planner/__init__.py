"""From a workload and a machine to a plan, and from a plan to a schedule.

The decisions:

    plan                 what lives where, what happens to every saved tensor, when updates run
    policies             published systems, one file each: functions to a plan
    prediction           what a plan gives, in the figures that people compare; `largest`: the largest model that fits

Lowering, from a plan to a schedule:

    lowering             the walk over compute ops (`walk`); `lowering_updates` has gradients and updates
    building             buffers, ops and their list order, as every lowering makes them
    tiling, partition    the same step in smaller pieces; on several devices
    lowering_packs       runs of units that visit devices in turn; `lowering_packs_alone` unit by unit on one
    lowering_paged       weights paged in and out for every use
    refine               the list order where devices contend

The program (docs/planner.md has its mathematics), in the order in which it is built:

    fluid                amounts in seconds and gigabytes
    milp                 `columns`, `queues` and `capacities` put together
    program              a linear program as arrays, solved by HiGHS or CBC
    bounds               what no schedule can beat, and what an impossible problem lacks
    rounding, whole      from shares to one placement and one action each

The search, by simulation:

    solve                the loop: bound, solve, round, lower, simulate, refine
    search, knobs        candidates and their budget; what the program cannot decide, tuned
    moves, restarts      local moves, and descents from elsewhere
    packs                packs for several devices, ranked by `pack_estimate`
    outer                micro-batch size and accumulation
    endurance            how much may be written for the drives to last
    explain_plan         what more memory, drives or link would be worth
    export               the plan as a file
"""
