"""ZeRO-Infinity (arXiv 2104.07857): each of parameters, optimizer and checkpoints on the device, the host or NVMe.

Parameters come through three overlapping stages: NVMe to host, host to device, and compute, each some units ahead of
the next. Gradients go to host memory in backward, are widened to fp32 and, where the optimizer is on NVMe, written
there. The optimizer runs after backward, unit by unit: states and gradients of one are read while the one before is
updated and the one before that is written back; buffers for four updates bound how far that runs ahead. With everything
on NVMe a parameter costs 20 bytes of reads (2 + 2 parameters, 12 states, 4 gradient) and 18 of writes (4, 12, 2).

Memory-centric tiling cuts each block's operators into `operator_tiles`, of which one at a time needs the device.

On several devices parameters, gradients and states are partitioned: each device fetches its share over its own link
and gathers the rest from its peers (`devices`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Place, Plan, UnitPlan
from tierplan.planner.policies.options import bounded_semantics, choice, has_nvme, need_nvme, number, read_options
from tierplan.sim.workload import Workload

NAME = "zero-infinity"
PLACES: tuple[Place, ...] = ("device", "host", "nvme")
OPTIONS: Mapping[str, object] = {
    "params": None,  # default: nvme where there is a drive, else host
    "optimizer": None,
    "checkpoints": "host",
    "prefetch": 2,
    "operator_tiles": 1,
    "devices": None,  # default: all that the machine has
    "semantics": None,
}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> Plan:
    """Places as asked for; blocks are recomputed from checkpoints; the optimizer runs after backward."""
    options = read_options(NAME, given, OPTIONS)
    lowest = "nvme" if has_nvme(machine) else "host"
    options["params"] = options["params"] or lowest
    options["optimizer"] = options["optimizer"] or lowest
    num_devices = sum(tier.kind == "device" for tier in machine.tiers)
    options["devices"] = options["devices"] or num_devices
    devices = int(number(NAME, options, "devices", low=1, high=num_devices))
    params = _place(options, "params")
    optimizer = _place(options, "optimizer")
    checkpoints = _place(options, "checkpoints")
    if "nvme" in (params, optimizer, checkpoints):
        need_nvme(NAME, machine)
    ahead = int(number(NAME, options, "prefetch", low=0))
    units = tuple(
        UnitPlan(
            params=params,
            grads=optimizer,
            states=optimizer,
            input=("keep" if checkpoints == "device" else checkpoints) if unit.kind == "block" else "keep",
            acts="recompute" if unit.kind == "block" else "keep",
        )
        for unit in workload.units
    )
    return Plan(
        policy=NAME,
        units=units,
        semantics=bounded_semantics(NAME, options, workload, "exact-clip"),
        prefetch_params_units=ahead,
        prefetch_acts_units=ahead,
        prefetch_states_units=1,
        strict_windows=True,
        updates_in_flight=4,
        hold_updates=True,
        update_order="backward",
        wide_grads=optimizer != "device",
        operator_tiles=int(number(NAME, options, "operator_tiles", low=1)),
        devices=devices,
        options=options,
    )


def _place(options: Mapping[str, object], name: str) -> Place:
    word = choice(NAME, options, name, PLACES)
    return next(place for place in PLACES if place == word)
