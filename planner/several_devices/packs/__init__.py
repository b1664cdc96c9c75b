"""Runs of units that visit devices in turn, or stay on them as stages:

task      one pack's turn on one device
by_turns  a schedule turn by turn, with one op for a whole pack (Harmony)
unitwise  the same unit by unit, as the runtime executes it
resident  stages that stay on their devices, one forward and one backward in turns (1F1B)
updates   by the host, or by devices to which states come for that
estimate  how long packs take, without simulating
search    better packs than Harmony's own search finds
stages    better stages than Megatron's
"""
