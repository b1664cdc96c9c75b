"""Placements that a unit may have: where its parameters, states and gradients live, and where it is updated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

from tierplan.planner.plan import UnitPlan
from tierplan.planner.plan_rules import PLACES, Place, UpdatePlace
from tierplan.sim.step import Semantics

Mode = UnitPlan
"""A unit's plan that says where things live, and nothing else."""


def _off_device(grads: Place, update: UpdatePlace = "home") -> list[Mode]:
    """With states off the device, and gradients that wait there; on NVMe only beside the states."""
    homes = product(PLACES, PLACES[1:] if grads != "nvme" else PLACES[2:])
    return [Mode(params=params, states=states, grads=grads, update=update) for params, states in homes]


_MODES = [Mode(), *(mode for grads in ("host", "device", "nvme") for mode in _off_device(grads))]
_MODES += _off_device("device", "device")
_RETURNING = [*_off_device("host", "device"), *_off_device("nvme", "device")]
MODES = tuple(
    replace(mode, frozen=frozen) for modes in (_MODES, _RETURNING) for frozen in (None, *PLACES) for mode in modes
)


@cache
def modes_of(
    *,
    has_frozen: bool,
    is_trained: bool,
    has_nvme: bool,
    has_host: bool,
    has_adam: bool,
    brings_states: bool,
    returns_grads: bool,
    has_several_blocks: bool,
    has_turns: bool,
    semantics: Semantics,
) -> tuple[int, ...]:
    """Numbers of the placements that a unit may have, by what it has, what there is for it, and when it is updated.

    Of micro-batches there may be `has_several_blocks`, between which gradients wait, and `has_turns`, in which they add
    up on the device.
    """
    if not is_trained and not has_frozen:
        return (0,)
    chosen = []
    for k, mode in enumerate(MODES):
        if (mode.frozen is not None) != has_frozen or (not is_trained and replace(mode, frozen=None) != MODES[0]):
            continue
        if "nvme" in (mode.params, mode.states, mode.grads, mode.frozen) and not has_nvme:
            continue
        if mode.frozen == "host" and not has_host:
            continue
        if is_trained and semantics == "delayed-1" and mode.states == "device":
            continue
        if is_trained and mode.states != "device":
            if not has_adam or not has_host:
                continue
            if mode.updated == "brought":
                chosen += [k] if brings_states and (returns_grads or not mode.returns_grads) else []
                continue
            waits_on_device = mode.grads == "device"
            if waits_on_device != has_turns and not has_several_blocks:
                continue  # one micro-batch: the same thing twice; a vertical turn accumulates on the device
            if mode.grads == "nvme" and semantics != "exact-clip":
                continue
        chosen.append(k)
    return tuple(chosen)
