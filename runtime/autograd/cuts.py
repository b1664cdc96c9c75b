"""Cuts in autograd's graph, where one unit ends and the next one begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from tierplan.runtime.autograd.containers import HandBack
from tierplan.runtime.autograd.nests import nodes_of
from tierplan.runtime.autograd.plain_values import PlainState
from tierplan.runtime.autograd.saved import Recorder, Treatment
from tierplan.runtime.autograd.units import ModelError, ModelUnit

Root = tuple[GradientEdge, torch.Tensor]
"""An output's place in the unit's graph, and the leaf that the next units see instead of it."""


@dataclass(eq=False)
class UnitRun:
    """One unit's forward for one micro-batch, until its backward has run."""

    treatment: Treatment | None = None
    """Where the unit may save others than planned, what happens to these."""
    recorder: Recorder | None = None
    leaves: list[torch.Tensor] = field(default_factory=list)
    """The differentiable tensors that the unit before hands over: `x/U`; their gradients are `dx/U`."""
    handed_over: list[int] = field(default_factory=list)
    """How often each of these had been written to when the unit before was done."""
    shared: list[torch.Tensor] = field(default_factory=list)
    """Those that it hands over for later units too; they and their gradients are part of `shared`."""
    read: list[torch.Tensor] = field(default_factory=list)
    """All leaves that a block reads, whoever made them."""
    roots: list[Root] = field(default_factory=list)
    glue: list[Root] = field(default_factory=list)
    """Differentiable work of the model between two blocks: its results and the leaves that the block sees."""
    call: tuple[Callable[..., Any], list[object], Callable[[Sequence[object]], tuple[tuple, dict]]] | None = None
    """To run a block again: its forward, what it was given, flat, and what nests it."""
    versions: list[int] = field(default_factory=list)
    """Of the tensors among these, how often each had been written to."""
    result: tuple[list[object], HandBack, tuple[torch.Tensor, ...]] | None = None
    """What a block returned, flat, what hands it back, and the random numbers behind it; held only where a unit between
    blocks is run again."""
    rng: tuple[torch.Tensor, ...] | None = None
    values: PlainState | None = None
    chosen: Mapping[str, object] = field(default_factory=dict)


Leaves = dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]]
"""By identity of a tensor that the model may pass to several blocks of a micro-batch, the leaf that stands for it."""


def cut(flat: Sequence[object], roots: list[Root], leaf_of: Leaves, *, is_passed_on: bool = False) -> list[object]:
    """The same values with every differentiable result replaced by a leaf; adds to `roots` where each came from.

    What `is_passed_on` by the model itself may come again, in a later block; then it is the same leaf.
    """
    new: dict[int, torch.Tensor] = {}
    out: list[object] = []
    for t in flat:
        if not isinstance(t, torch.Tensor) or t.grad_fn is None:
            out.append(t)
            continue
        known = leaf_of.get(id(t))
        if known is not None and known[0]() is t:
            new[id(t)] = known[1]
        elif id(t) not in new:
            new[id(t)] = t.detach().requires_grad_()
            roots.append((get_gradient_edge(t), new[id(t)]))
            if is_passed_on:
                leaf_of[id(t)] = (weakref.ref(t), new[id(t)])
        out.append(new[id(t)])
    return out


class Layouts:
    """How the gradients of a micro-batch's leaves lie when autograd has made them.

    For a leaf autograd copies what lies otherwise than that; without the cut, what made the leaf gets it as it lies,
    and adds up in that order.
    """

    def __init__(self, known: set[object]) -> None:
        """`known` are leaves that need no look, of all micro-batches: they and their gradients are contiguous."""
        self._known = known
        self._found: list[tuple[weakref.ref[torch.Tensor], tuple[int, ...] | None]] = []

    def watch(self, cut: object, leaves: Iterable[torch.Tensor]) -> None:
        """Notes how the gradients will lie that these leaves get; `cut` says where in the model they are."""
        for k, leaf in enumerate(leaves):
            if leaf.requires_grad and (key := (cut, k, leaf.shape)) not in self._known:
                leaf.register_hook(partial(self._note, key if leaf.is_contiguous() else None, weakref.ref(leaf)))

    def _note(self, key: object, leaf: weakref.ref[torch.Tensor], gradient: torch.Tensor) -> None:
        is_contiguous = gradient.is_contiguous()
        if key is not None and is_contiguous:
            self._known.add(key)
        else:
            self._found.append((leaf, None if is_contiguous else gradient.stride()))

    def restore(self) -> None:
        """Lays what autograd has just made as it lay, where its values have memory of their own."""
        for own, stride in self._found:
            if (leaf := own()) is None or (gradient := leaf.grad) is None:
                continue
            if stride is None:
                leaf.grad = gradient.contiguous()
            elif gradient.stride() != stride and _is_dense(gradient.shape, stride):
                leaf.grad = gradient.new_empty_strided(gradient.shape, stride).copy_(gradient)
        self._found.clear()


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether such a tensor fills its memory, each value at a place of its own."""
    own = sorted((step, length) for step, length in zip(stride, shape, strict=True) if length != 1)
    steps = accumulate((length for _, length in own), mul, initial=1)
    return all(step == wanted for (step, _), wanted in zip(own, steps, strict=False))


def check_cut(
    name: str, roots: Sequence[Root], runs: Iterable[UnitRun], away: Mapping[str, Iterable[torch.Tensor]]
) -> None:
    """Raises `ModelError` where the graph of a unit with these roots goes past its boundary, to those of others in the
    same `runs`, or begins with what is `away` (`check_read`)."""
    own = {edge.node for edge, _ in roots}
    other = {edge.node for run in runs for edge, _ in (*run.roots, *run.glue)} - own
    nodes = [*nodes_of(own)]
    if any(node in other for node in nodes):
        raise ModelError(
            f"the model uses what it gave to an earlier block again at {name!r}, such as a residual that is added "
            "outside of the blocks; let blocks do that, and return what is needed later"
        )
    check_read(name, (node.variable for node in nodes if hasattr(node, "variable")), away)


def check_loss(loss: torch.Tensor, absent: Mapping[int, tuple[str, str]]) -> None:
    """Raises `ModelError` where a loss comes from a parameter that need not be there, each by its identity, with its
    name and that of its unit."""
    for node in nodes_of([loss.grad_fn] if loss.grad_fn is not None else []):
        if (used := absent.get(id(getattr(node, "variable", None)))) is not None:
            raise ModelError(
                f"the loss function uses parameter {used[0]!r} of unit {used[1]!r}, where a schedule need not have it; "
                "a loss may use what the model and the batch give, and parameters of the head. Let the block return "
                "this term (the optimizer decays weights, without a term of the loss)"
            )


def absent_at_loss(units: Sequence[ModelUnit]) -> dict[int, tuple[str, str]]:
    """What `check_loss` refuses: all parameters but those of the head, and of the unit whose parameters it uses too."""
    there = (units[-1].name, units[-1].shares)
    absent = ((unit, name, p) for unit in units if unit.name not in there for name, p in unit.all_parameters)
    return {id(p): (name, unit.name) for unit, name, p in absent}


def handed_over(roots: Sequence[Root], flat: Sequence[object]) -> list[torch.Tensor]:
    """The leaves that a unit hands over; where all before is frozen, its first result, of which none has a gradient."""
    first = (t for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point())
    return [leaf for _, leaf in roots] or [next(first)]


def check_read(name: str, read: Iterable[torch.Tensor], away: Mapping[str, Iterable[torch.Tensor]]) -> None:
    """Refuses a unit that reads what is `away`, by the earlier unit whose input it is: the plan takes inputs for one
    unit's alone, and this one off the device."""
    owners = {id(leaf): owner for owner, leaves in away.items() for leaf in leaves}
    if (owner := next((owners[id(t)] for t in read if id(t) in owners), None)) is not None:
        raise ModelError(
            f"{name!r} reads what {owner!r} has as its input, which the plan takes off the device; choose a plan whose "
            "inputs stay there (input='keep'), or have the model hand a copy of it to later blocks"
        )


def check_input(name: str, leaves: Iterable[torch.Tensor], versions: Sequence[int]) -> None:
    """Refuses a unit whose input, which the plan takes off the device, was written to since it was handed over."""
    if [leaf._version for leaf in leaves] != versions:
        raise ModelError(
            f"the input of {name!r}, which the plan takes off the device, is changed in place, by the unit or in front "
            "of it; make a new tensor there, or choose a plan whose inputs stay there (input='keep')"
        )


def backward_from(edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """As `torch.autograd.backward`, without its checks of gradients: autograd has made these itself, and a small unit's
    backward takes little longer than they do."""
    _engine_run_backward(tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
