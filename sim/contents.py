"""Contents of buffers, names of buffers, and keys of ops. They are made and parsed here, and nowhere else.

A *content* says what the bytes of a buffer are, the same in every tier that they visit: `params/L3`, `x/L3/mb0`. Each
kind of content is a record, whose text is `str(content)`; `parse_content` gives the record back. A *buffer's name* is
its content, its tier and a version: `params/L3@host#0`. An *op's key* says what is done to what, and when in the step:
`fetch_params/L3/bwd/mb0`. Where several steps are joined to one schedule, keys and names begin with the number of the
step: `s2/fwd/L3/mb0`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from tierplan.hwmodels.names import device, device_index


class ContentError(ValueError):
    """A text that is no content of a training step."""


# ---- contents ----


@dataclass(frozen=True, slots=True)
class Params:
    """Parameters of a unit in one flat buffer."""

    unit: str
    device: int | None = None
    """Whose copy it is, where every device has one of its own."""

    def __str__(self) -> str:
        return _path("params", self.unit, _copy_of(self.device))


@dataclass(frozen=True, slots=True)
class _OfUnit:
    """Something of a unit."""

    unit: str
    FORM: ClassVar[tuple[str, str]]
    """What stands before and behind it: `grads/L3/fp32`. Each kind has its own."""

    def __str__(self) -> str:
        kind, end = self.FORM
        return _path(kind, self.unit, end)


class Frozen(_OfUnit):
    """Parameters of a unit that are not trained, in one flat buffer that nobody writes."""

    FORM = ("frozen", "")


class CastGradients(_OfUnit):
    """The fp32 copy of a unit's gradients, on its way to NVMe."""

    FORM = ("grads", "fp32")


class Norm(_OfUnit):
    """The norm of each parameter's gradient in one unit."""

    FORM = ("norm", "")


@dataclass(frozen=True, slots=True)
class States:
    """Optimizer states of a unit in one flat buffer, or one shard of them.

    A shard has the states of consecutive parameters, region by region as in the whole (`master | first | second`).
    """

    unit: str
    part: int = 0
    num_parts: int = 1
    device: int | None = None

    def __str__(self) -> str:
        return _path("states", self.unit, self._part, _copy_of(self.device))

    @property
    def update_key(self) -> str:
        """The key of the update that writes these states: `update/L3/1of4`."""
        return _path("update", self.unit, self._part, _copy_of(self.device))

    @classmethod
    def updated_by(cls, key: str) -> States:
        """Those of the update with this key."""
        content = parse_content(key.replace("update", "states", 1))
        assert isinstance(content, cls), key
        return content

    @property
    def _part(self) -> str:
        return f"{self.part}of{self.num_parts}" if self.num_parts > 1 else ""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of a unit's (or a pack's) parameters; those of micro-batch 0 are the ones that others are added to."""

    unit: str
    micro_batch: int | None = None
    device: int | None = None

    def __str__(self) -> str:
        batch = "" if self.micro_batch is None else micro_batch_name(self.micro_batch)
        return _path("grads", self.unit, batch, _copy_of(self.device))


@dataclass(frozen=True, slots=True)
class _OfMicroBatch:
    """Something of a unit in one micro-batch."""

    unit: str
    micro_batch: int
    FORM: ClassVar[tuple[str, str]]
    """What stands before and behind these two: `acts/L3/mb0/keep`. Each kind has its own."""

    def __str__(self) -> str:
        kind, end = self.FORM
        return _path(kind, self.unit, micro_batch_name(self.micro_batch), end)


class TiedGradients(_OfMicroBatch):
    """What a tied head adds to the gradient of the parameters of `unit`."""

    FORM = ("tied", "")


class Input(_OfMicroBatch):
    """A unit's input."""

    FORM = ("x", "")


class CodedInput(_OfMicroBatch):
    """A unit's input in the format in which activations leave the device."""

    FORM = ("x", "coded")
    is_coded: ClassVar[bool] = True


class InputGradient(_OfMicroBatch):
    """The gradient of a unit's input."""

    FORM = ("dx", "")


class KeptActs(_OfMicroBatch):
    """All saved tensors of a unit that stay on the device, together."""

    FORM = ("acts", "keep")


class RecomputedActs(_OfMicroBatch):
    """All saved tensors of a unit that were dropped and recomputed, together."""

    FORM = ("acts", "re")


class PackActs(_OfMicroBatch):
    """All that the recomputation of a pack makes; `unit` is the pack's name."""

    FORM = ("acts", "")


@dataclass(frozen=True, slots=True)
class SavedActs:
    """Saved tensors that are moved to the host or NVMe, one behind the other."""

    unit: str
    micro_batch: int
    indices: tuple[int, ...]
    """Of `Unit.saved`: one, or several small ones."""
    is_coded: bool = False
    """In the format in which activations leave the device."""

    def __str__(self) -> str:
        end = "coded" if self.is_coded else ""
        return _path("acts", self.unit, micro_batch_name(self.micro_batch), "+".join(map(str, self.indices)), end)


@dataclass(frozen=True, slots=True)
class Shared:
    """What is made once and used by every block: masks, rotary tables."""

    micro_batch: int

    def __str__(self) -> str:
        return _path("shared", micro_batch_name(self.micro_batch))


NORM_BYTES = 4096
"""Room for the norms of one unit's parameters."""


@dataclass(frozen=True, slots=True)
class Clip:
    """The coefficient of exact clipping by the global norm."""

    def __str__(self) -> str:
        return "clip"


@dataclass(frozen=True, slots=True)
class Transient:
    """What an op needs while it runs, beside its other buffers."""

    key: str
    """Of the op."""

    def __str__(self) -> str:
        return _path("work", self.key)


Content = Params | _OfUnit | States | Gradients | _OfMicroBatch | SavedActs | Shared | Clip | Transient
_OF_UNIT = {kind.FORM: kind for kind in (Frozen, CastGradients, Norm)}
_OF_MICRO_BATCH = {
    kind.FORM: kind for kind in (TiedGradients, Input, CodedInput, InputGradient, KeptActs, RecomputedActs, PackActs)
}
_MICRO_BATCH = re.compile(r"mb(\d+)")
_INDICES = re.compile(r"\d+(\+\d+)*")
_PART = re.compile(r"(\d+)of(\d+)")


@lru_cache(maxsize=2**16)
def parse_content(text: str) -> Content:
    """The content with this text. Raises `ContentError` for any other text."""
    kind, _, rest = text.partition("/")
    if kind == "work" and rest:
        return Transient(rest)
    where = rest.split("/") if rest else []
    content: Content | None = None
    match kind, where:
        case _, [unit, *end] if of_unit := _OF_UNIT.get((kind, "/".join(end))):
            content = of_unit(unit)
        case "clip", []:
            content = Clip()
        case "shared", [batch]:
            content = Shared(_number(batch))
        case "params", [unit, *copy]:
            content = Params(unit, _device_of(copy))
        case "states", [unit, part, *copy] if match := _PART.fullmatch(part):
            content = States(unit, int(match[1]), int(match[2]), _device_of(copy))
        case "states", [unit, *copy]:
            content = States(unit, device=_device_of(copy))
        case "grads", [unit, batch, *copy] if _MICRO_BATCH.fullmatch(batch):
            content = Gradients(unit, _number(batch), _device_of(copy))
        case "grads", [unit, *copy]:
            content = Gradients(unit, None, _device_of(copy))
        case "acts", [unit, batch, indices, *coded] if _INDICES.fullmatch(indices) and coded in ([], ["coded"]):
            content = SavedActs(unit, _number(batch), tuple(map(int, indices.split("+"))), is_coded=bool(coded))
        case _, [unit, batch, *end] if of_batch := _OF_MICRO_BATCH.get((kind, "/".join(end))):
            content = of_batch(unit, _number(batch))
    if content is None or str(content) != text:
        raise ContentError(
            f"{text!r} is no content of a training step; docs/design.md lists them under 'Contents of buffers'"
        )
    return content


def _number(batch: str) -> int:
    match = _MICRO_BATCH.fullmatch(batch)
    return int(match[1]) if match else -1


def _device_of(copy: list[str]) -> int | None:
    return device_index(copy[0]) if copy else None


def _copy_of(index: int | None) -> str:
    return "" if index is None else device(index)


GRAIN = 1024
"""Parts are multiples of so many parameters: whole vectors, which keeps the optimizer's bits, and whole pages of 4 KiB
for states of any number of fp32 values."""


def part_ranges(num_parameters: int, num_parts: int) -> list[range]:
    """The parameters of each part: equal but for the last, and fewer parts where the unit has too few parameters."""
    each = max(1, -(-num_parameters // (num_parts * GRAIN))) * GRAIN
    return [range(begin, min(begin + each, num_parameters)) for begin in range(0, num_parameters, each)]


def shard(values: range, index: int, num_shards: int) -> range:
    """One device's share of consecutive values: about equal, and none is larger than that of the first device."""
    each, more = divmod(len(values), num_shards)
    begin = values.start + index * each + min(index, more)
    return range(begin, begin + each + (index < more))


SHARD_GRAIN = 32
"""Parts of a shard are multiples of so many parameters, whole vectors, but for the last."""


def part_of_shard(num_parameters: int, part: int, num_parts: int) -> range:
    """What one of as many parts has of a device's shard of a unit's states, counted from the shard's begin."""
    ends = [num_parameters * k // num_parts // SHARD_GRAIN * SHARD_GRAIN for k in (part, part + 1)]
    return range(ends[0], num_parameters if part + 1 == num_parts else ends[1])


# ---- names of buffers ----


def buffer_name(content: Content | str, tier: str, version: int | None = None) -> str:
    """`params/L3@host#0`; without a version where there is never more than one."""
    return f"{content}@{tier}" + ("" if version is None else f"#{version}")


def device_name(name: str, index: int) -> str:
    """The name or the key that stands for this one on a device, where each device has its own: `fwd/L3/mb0/gpu1`."""
    return _path(name, device(index))


# ---- keys of ops ----


@dataclass(frozen=True, slots=True)
class OpKey:
    """The parts of an op's key."""

    verb: str
    """`fwd`, `recompute`, `bwd`, `update`, ...; of a copy `fetch`, `offload`, `read` or `write`."""
    moved: str = ""
    """Of a copy or a collective, the kind of content: `params`, `acts`, `x`."""
    where: tuple[str, ...] = ()
    """The unit first, then what tells this op from others of the unit: phase, micro-batch, part, device."""


def op_key(verb: Content | str, *where: str) -> str:
    """A key, or what is said of a copy in it, of these words; empty ones are left out."""
    return _path(str(verb), *where)


def copy_key(verb: str, moved: Content | str) -> str:
    """The key of a copy: `fetch_x/L3/mb0`. `moved` is the content, or says in addition what it is brought for."""
    return f"{verb}_{moved}"


def forward_key(unit: str, micro_batch: int) -> str:
    """The key of a unit's (or a pack's) forward: `fwd/L3/mb0`."""
    return op_key("fwd", unit, micro_batch_name(micro_batch))


def recompute_key(unit: str, micro_batch: int) -> str:
    return op_key("recompute", unit, micro_batch_name(micro_batch))


def backward_key(unit: str, micro_batch: int) -> str:
    return op_key("bwd", unit, micro_batch_name(micro_batch))


def micro_batch_name(micro_batch: int) -> str:
    """`mb0`: as a micro-batch is called in contents and keys."""
    return f"mb{micro_batch}"


def pack_name(first_unit: str, last_unit: str) -> str:
    """`L0-L3`: as a pack is called."""
    return f"{first_unit}-{last_unit}"


def tile_name(unit: str, tile: int) -> str:
    """`L3.1`: as one of the units is called into which a unit's operators are cut."""
    return f"{unit}.{tile}"


def is_tile(unit: str) -> bool:
    """Whether a unit is one of those that `tile_name` names."""
    return "." in unit


_ONE_WORD = ("all_reduce",)


def parse_key(key: str) -> OpKey:
    """The parts of a key, without that of the step. Any text has some: a schedule may have keys of its own."""
    head, *where = split_step(key).key.split("/")
    verb, _, moved = (head, "", "") if head in _ONE_WORD else head.partition("_")
    return OpKey(verb, moved, tuple(where))


def _path(*words: str) -> str:
    return "/".join(filter(None, words))


# ---- several steps in one schedule ----


@dataclass(frozen=True, slots=True)
class StepKey:
    """The key of an op, or the name of a buffer, in a schedule or trace of several steps."""

    step: int | None
    """None where it names no step: that of a single step."""
    key: str
    """Without the step."""


_STEP = re.compile(r"s(\d+)/(.+)", re.DOTALL)


def step_prefix(step: int) -> str:
    """The prefix of the keys and names of a step: `s2/`."""
    return f"s{step}/"


def split_step(key: str) -> StepKey:
    """`s3/fwd/L0/mb0` is `fwd/L0/mb0` of step 3."""
    match = _STEP.fullmatch(key)
    return StepKey(int(match[1]), match[2]) if match else StepKey(None, key)
