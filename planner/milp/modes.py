"""Placements that a unit may have: where its parameters, states and gradients live, and where it is updated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from tierplan.planner.plan_rules import PLACES, Place, UpdatePlace
from tierplan.sim.step import Semantics


@dataclass(frozen=True, slots=True)
class Mode:
    """Where a unit's parameters, optimizer states and waiting gradients live."""

    params: Place
    states: Place
    grads: Place
    frozen: Place | None = None
    """Where frozen parameters live, of a unit that has any."""
    update: UpdatePlace = "home"
    """`device`: states, and gradients, that are elsewhere come there for the update."""

    @property
    def updated(self) -> Literal["device", "host", "brought"]:
        """Where the update is made: on the device with states that are there, or brought there; or by the host."""
        return "device" if self.states == "device" else "brought" if self.update == "device" else "host"

    @property
    def returns_grads(self) -> bool:
        """Whether gradients leave the device and come back for the update."""
        return self.updated == "brought" and self.grads != "device"


_MODES: tuple[Mode, ...] = (
    Mode("device", "device", "device"),
    *(Mode(p, s, "host") for p in ("device", "host", "nvme") for s in ("host", "nvme")),
    *(Mode(p, s, "device") for p in ("device", "host", "nvme") for s in ("host", "nvme")),
    *(Mode(p, "nvme", "nvme") for p in ("device", "host", "nvme")),
    *(Mode(p, s, "device", update="device") for p in ("device", "host", "nvme") for s in ("host", "nvme")),
)
_RETURNING: tuple[Mode, ...] = (
    *(Mode(p, s, "host", update="device") for p in ("device", "host", "nvme") for s in ("host", "nvme")),
    *(Mode(p, "nvme", "nvme", update="device") for p in ("device", "host", "nvme")),
)
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
