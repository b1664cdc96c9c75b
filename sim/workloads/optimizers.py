"""Optimizers as data: what each keeps of every parameter, what an update costs, and where its states may be cut.

    optimizer_of("adamw:states=8bit")     of a name with options, as `--optimizer` takes it

To add an optimizer, write a function from its options to an `Optimizer` and enter it in `OPTIMIZERS`; the runtime
executes those that have a step of their own in `tierplan.runtime.optim`. The shape of a parameter decides where it has
to: Muon orthogonalises whole matrices, blocks of 8-bit states do not go across two parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache
from math import prod
from typing import TypeVar

from tierplan.sim.contents import part_ranges
from tierplan.sim.workloads.formats import FORMATS

Shape = tuple[int, ...]
VECTOR_ELEMENTS = 16
"""The widest vector of fp32 (AVX-512)."""
FEWEST_CODED = 4096
"""Values of a parameter whose moments are coded in 8 or 4 bits; those of smaller ones are not (as in torchao)."""
NEWTON_SCHULZ_STEPS = 5
FLOPS_PER_HOST_UPDATE = 500
"""Of matrix products that a CPU makes in the time in which it updates one parameter with fp32 Adam: what Muon's and
GaLore's products count as on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What an optimizer keeps of one parameter beside the master copy."""

    name: str
    num_values: int
    format: str = "fp32"

    @property
    def size_bytes(self) -> int:
        return FORMATS[self.format].size_bytes(self.num_values)


T = TypeVar("T")


def in_flat_order(parameters: Iterable[T], shape: Callable[[T], Shape]) -> list[T]:
    """As they lie in a unit's flat buffer: those that are whole vectors first, else in the model's order."""
    return sorted(parameters, key=lambda p: prod(shape(p)) % VECTOR_ELEMENTS != 0)


Moments = Callable[[Shape, bool, str], tuple[Moment, ...]]
"""From a parameter's shape, whether it is a matrix of a block, and the dtype of what is updated."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Optimizer:
    """One optimizer with its options."""

    spec: str
    """Its name with the options that are not the default: equal for equal optimizers."""
    moments: Moments
    options: Mapping[str, object]
    grain: int | None = 1
    """A parameter's states may be cut at multiples of so many values; None where it has to stay whole. 1: moments are
    as many values as the parameter has, of one format, so that a unit's lie region by region and are cut anywhere."""
    keeps_master: bool = True
    """Whether there may be an fp32 master copy among the states."""
    is_stochastic: bool = False
    """Whether a step is made in fp32, and weights and moments are rounded to bf16 by chance (Gupta et al. 2015)."""
    host_work: float = 1.0
    """Of one parameter's update on the host's cores, beside matrix products: 1 is fp32 Adam."""
    flops: Callable[[Shape, bool], float] = lambda shape, is_hidden: 0.0
    """Of matrix products in one parameter's update."""

    @property
    def is_flat(self) -> bool:
        """Whether states lie region by region, alike for all parameters."""
        return self.grain == 1

    @cached_property
    def flat_bytes(self) -> int:
        """Of the moments of one parameter, where states are flat."""
        return sum(moment.size_bytes for moment in self.moments((1,), False, "fp32"))


@dataclass(frozen=True, slots=True)
class Owned:
    """The parameters of one unit, as an optimizer looks at them."""

    shapes: tuple[Shape, ...]
    """In flat order."""
    is_block: bool

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.shapes))

    def tensors(self) -> Iterator[tuple[int, Shape, bool]]:
        """Each with where it begins, and whether it is a matrix of a block."""
        begin = 0
        for shape in self.shapes:
            yield begin, shape, self.is_block and len(shape) == 2
            begin += prod(shape)


@lru_cache(maxsize=4096)
def state_parts(optimizer: Optimizer, owned: Owned, num_parts: int) -> tuple[range, ...]:
    """The parameters of each part in which a unit's states travel: about equal, cut where the optimizer allows it.

    So many parts, or the most below that which are all there, so that their number says how a unit's states are cut.
    """
    even = part_ranges(owned.num_parameters, num_parts)
    if optimizer.is_flat or num_parts == 1:
        return tuple(even)
    ends = {even[-1].stop}
    for cut in (part.start for part in even[1:]):
        begin, shape, _ = next(t for t in owned.tensors() if t[0] <= cut < t[0] + prod(t[1]))
        size = prod(shape) if optimizer.grain is None else optimizer.grain
        ends.add(begin + (cut - begin) // size * size)
    ends.discard(0)
    if len(ends) < num_parts:
        return state_parts(optimizer, owned, num_parts - 1)
    return tuple(range(a, b) for a, b in zip((0, *sorted(ends)), sorted(ends), strict=False))


@dataclass(frozen=True, slots=True)
class Piece:
    """What a part of a unit's states has of one parameter."""

    index: int
    """Of the parameter."""
    values: range
    """Of the parameter's own."""
    begin: int
    """Of the first of them, in the unit's flat buffer."""
    moments: tuple[Moment, ...]

    def size_bytes(self, master_bytes: int) -> int:
        return len(self.values) * master_bytes + sum(moment.size_bytes for moment in self.moments)


@lru_cache(maxsize=4096)
def pieces(optimizer: Optimizer, owned: Owned, part: range, updated: str) -> tuple[Piece, ...]:
    """What lies in a part of a unit's states, parameter by parameter: the master copy if any, then the moments."""
    listed = []
    for index, (begin, shape, is_hidden) in enumerate(owned.tensors()):
        size = prod(shape)
        a, b = max(part.start - begin, 0), min(part.stop - begin, size)
        if a >= b:
            continue
        moments = optimizer.moments(shape, is_hidden, updated)
        if b - a < size:
            moments = tuple(Moment(name=m.name, num_values=b - a, format=m.format) for m in moments)
        listed.append(Piece(index, range(a, b), begin + a, moments))
    return tuple(listed)


@lru_cache(maxsize=4096)
def states_bytes(optimizer: Optimizer, owned: Owned, part: range, updated: str, master_bytes: int) -> int:
    """Of a part of a unit's states."""
    return sum(piece.size_bytes(master_bytes) for piece in pieces(optimizer, owned, part, updated))


@lru_cache(maxsize=4096)
def update_flops(optimizer: Optimizer, owned: Owned, part: range) -> float:
    """Of matrix products in the update of a part of a unit."""
    tensors = (t for t in owned.tensors() if part.start <= t[0] < part.stop)
    return sum(optimizer.flops(shape, is_hidden) for _, shape, is_hidden in tensors)


# ---- what each keeps ----


def _values(*names: str, of: str = "fp32") -> Moments:
    """As many values of one format as the parameter has. One in blocks with a scale each is not for small or odd
    parameters: those have them in the dtype of what is updated."""
    block = FORMATS[of].block

    def moments(shape: Shape, is_hidden: bool, updated: str) -> tuple[Moment, ...]:
        size = prod(shape)
        form = updated if block and (size < FEWEST_CODED or size % block) else of
        return tuple(Moment(name=name, num_values=size, format=form) for name in names)

    return moments


ADAM = ("first", "second")
STATES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {"keeps_master": False, "host_work": 14 / 30}),
    "8bit": ("dynamic8", {"grain": FORMATS["dynamic8"].block, "host_work": 6.0}),
    "4bit": ("dynamic4", {"grain": FORMATS["dynamic4"].block, "host_work": 6.0}),
    "4bit-256": ("dynamic4-256", {"grain": FORMATS["dynamic4-256"].block, "host_work": 6.0}),
    "bf16-stochastic": (
        "bf16",
        {"keeps_master": False, "host_work": 8.0, "is_stochastic": True, "grain": VECTOR_ELEMENTS},
    ),
}
"""The formats that moments may have, and what else of an optimizer that decides. Those in bf16 are in the dtype of the
weights, of which there is no other copy.

Work on the host is in updates of fp32 states: for bf16 what memory moves, 14 bytes of each parameter instead of 30;
rounded by chance what the runtime takes on a core of one server (`benchmarks/runtime/host_work.py`, which shows that
coded states take it longer than what stands here: an estimate of a kernel that makes an update in one pass)."""


def _stored(names: tuple[str, ...], states: str) -> dict[str, object]:
    """How moments lie in one of these."""
    if states not in STATES:
        raise ValueError(f"states is {states!r}; choose among {', '.join(STATES)}")
    form, others = STATES[states]
    return {"moments": _values(*names, of=form), **others}


def _sgd(momentum: float = 0.0) -> dict[str, object]:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum:g}; it must be at least 0 and below 1")
    return {"moments": _values("momentum") if momentum else _values()}


def _muon(momentum: float = 0.95) -> dict[str, object]:
    """On matrices of blocks; other parameters have Adam."""

    def moments(shape: Shape, is_hidden: bool, updated: str) -> tuple[Moment, ...]:
        return _values(*(("momentum",) if is_hidden else ADAM))(shape, is_hidden, updated)

    def flops(shape: Shape, is_hidden: bool) -> float:
        m, n = min(shape, default=1), max(shape, default=1)
        return NEWTON_SCHULZ_STEPS * (4.0 * m * m * n + 2.0 * m**3) if is_hidden else 0.0

    return {"moments": moments, "grain": None, "flops": flops}


def _adafactor() -> dict[str, object]:
    """Second moments of matrices as a row and a column; no first moment."""

    def moments(shape: Shape, is_hidden: bool, updated: str) -> tuple[Moment, ...]:
        if len(shape) < 2:
            return (Moment(name="second", num_values=prod(shape)),)
        rest = prod(shape[:-2])
        return (
            Moment(name="row", num_values=rest * shape[-2]),
            Moment(name="column", num_values=rest * shape[-1]),
        )

    return {"moments": moments, "grain": None}


def _low_rank(rank: int, keeps_projector: bool) -> dict[str, object]:
    """Adam on matrices of blocks as they are after a projection of the shorter side to `rank`; plain Adam elsewhere."""
    if rank < 1:
        raise ValueError(f"rank is {rank}; it must be a whole number of 1 or more")

    def is_projected(shape: Shape, is_hidden: bool) -> bool:
        return is_hidden and min(shape) > rank

    def moments(shape: Shape, is_hidden: bool, updated: str) -> tuple[Moment, ...]:
        if not is_projected(shape, is_hidden):
            return _values(*ADAM)(shape, is_hidden, updated)
        m, n = min(shape), max(shape)
        kept = tuple(Moment(name=name, num_values=rank * n) for name in ADAM)
        return (*kept, Moment(name="projector", num_values=m * rank)) if keeps_projector else kept

    def flops(shape: Shape, is_hidden: bool) -> float:
        times = 4.0 if keeps_projector else 2.0  # into the space and back; APOLLO takes only norms from it
        return times * rank * prod(shape) if is_projected(shape, is_hidden) else 0.0

    return {"moments": moments, "grain": None, "flops": flops}


OPTIMIZERS: dict[str, Callable[..., dict[str, object]]] = {
    "adamw": lambda states="fp32": _stored(ADAM, states),
    "sgd": _sgd,
    "lion": lambda states="fp32": _stored(("first",), states),
    "muon": _muon,
    "adafactor": _adafactor,
    "galore": lambda rank=128: _low_rank(rank, keeps_projector=True),
    "apollo": lambda rank=256: _low_rank(rank, keeps_projector=False),  # it makes its projection again from a seed
}
"""By name, from options to the fields of an `Optimizer`."""

OF_TRANSFORMERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw:states=8bit"),
    "adamw_torch_4bit": "adamw:states=4bit-256",
    "sgd": "sgd",
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion_32bit"), "lion"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion:states=8bit"),
    "adafactor": "adafactor",
    "galore_adamw": "galore",
    "apollo_adamw": "apollo",
}
"""What the Hugging Face Trainer's `optim` keeps."""


@lru_cache(maxsize=256)
def optimizer_of(spec: str) -> Optimizer:
    """The optimizer of a name with options: `sgd:momentum=0.9`. Raises `ValueError` for what is unknown, by name."""
    name, _, given = spec.partition(":")
    make = OPTIMIZERS.get(name)
    if make is None:
        near = get_close_matches(name, (*OF_TRANSFORMERS, *OPTIMIZERS), n=1)
        meant = "".join(f"did you mean {OF_TRANSFORMERS.get(close, close)!r}? " for close in near)
        raise ValueError(f"optimizer {name!r} is unknown; {meant}choose among {', '.join(OPTIMIZERS)}")
    defaults = {key: parameter.default for key, parameter in inspect.signature(make).parameters.items()}
    options = dict(defaults)
    for setting in given.split(",") if given else ():
        key, sign, value = setting.partition("=")
        if key not in defaults or not sign:
            rule = ", ".join(f"{key}={default}" for key, default in defaults.items()) or "none"
            raise ValueError(f"optimizer {spec!r} has option {setting!r}; those of {name} are (with defaults): {rule}")
        try:
            options[key] = type(defaults[key])(value)
        except ValueError:
            kind = "a whole number" if isinstance(defaults[key], int) else "a number"
            raise ValueError(f"optimizer {spec!r}: {key} is {value!r}; it must be {kind}") from None
    try:
        fields = make(**options)
    except ValueError as error:
        raise ValueError(f"optimizer {spec!r}: {error}") from None
    changed = ",".join(f"{key}={value}" for key, value in options.items() if value != defaults[key])
    return Optimizer(spec=f"{name}:{changed}" if changed else name, options=options, **fields)  # type: ignore[arg-type]


def of_transformers(optim: str) -> str:
    """The optimizer that the Trainer's `optim` names. Raises `ValueError` for one that is not known here."""
    name = optim.removeprefix("OptimizerNames.").lower()
    if name not in OF_TRANSFORMERS:
        raise ValueError(f"optim is {optim!r}; {', '.join(OF_TRANSFORMERS)} are supported")
    return OF_TRANSFORMERS[name]
