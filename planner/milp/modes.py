"""Placements that a unit may have: where its parameters, states and gradients live, and where it is updated."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from tierplan.planner.plan import UnitPlan
from tierplan.planner.plan_rules import PLACES, Place, UpdatePlace

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
