"""How a unit's optimizer states lie in one flat buffer, or in the parts in which they travel.

States that are alike for all parameters lie region by region: `[master copy, if any | first moment | second moment]`.
Others lie parameter by parameter, in each the master copy, then its moments, coded ones as codes and scales.

LayoutError(ValueError)   states that are not cut as a schedule says
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from tierplan.runtime.execution.device import TORCH_DTYPES
from tierplan.runtime.optim.codes import code_values, decoded, encode
from tierplan.sim.contents import States
from tierplan.sim.workloads.formats import FORMATS
from tierplan.sim.workloads.optimizers import Optimizer, Owned, Shape, optimizer_of, pieces, state_parts, states_bytes

MASTER_BYTES = 4


class LayoutError(ValueError):
    """States that are not cut as a schedule says."""


@dataclass(frozen=True, slots=True)
class View:
    """The states of neighbouring values in a flat buffer."""

    index: int
    """Of the parameter, where they are of one."""
    begin: int
    """Of the first value, in the unit's flat buffer."""
    length: int
    shape: Shape
    """Of the parameter, where all of it is here."""
    tensors: Mapping[str, torch.Tensor]
    """Flat, by name: `master`, `first`, ...; codes have their scales beside them, as `first scales`."""
    formats: Mapping[str, str]
    """By name of those that are coded."""
    offset: int = 0
    """Of the first value in its parameter, where they are of one."""

    def moments(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """Of some values: the stored ones, or what the codes stand for."""
        moments = {}
        for name, stored in self.tensors.items():
            if name != "master" and not name.endswith(" scales"):
                codes = self._some(stored, begin, end)
                coded = name in self.formats
                moments[name] = decoded(codes, self._scales(name, begin, end), self._values(name)) if coded else codes
        return moments

    def keep(self, moments: Mapping[str, torch.Tensor], begin: int, end: int) -> None:
        """Encodes what a step has made of `moments`."""
        for name in self.formats:
            codes = self._some(self.tensors[name], begin, end)
            encode(moments[name], codes, self._scales(name, begin, end), self._values(name))

    def _scales(self, name: str, begin: int, end: int) -> torch.Tensor:
        return self._some(self.tensors[f"{name} scales"], begin, end)

    def _values(self, name: str) -> torch.Tensor:
        return code_values(FORMATS[self.formats[name]].bits, name != "second", self.tensors[name].device)

    def _some(self, stored: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """What a tensor has of some values, of which it need not have one each."""
        return stored[begin * len(stored) // self.length : end * len(stored) // self.length]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The states of one unit."""

    optimizer: Optimizer
    owned: Owned
    dtype: str
    """Of the parameters."""
    has_master: bool

    def part(self, content: States) -> range:
        """The parameters whose states these are. Raises `LayoutError` where the unit's are not cut so."""
        parts = state_parts(self.optimizer, self.owned, content.num_parts)
        if content.part >= len(parts):
            raise LayoutError(f"states of unit {content.unit!r} have {len(parts)} parts; the schedule has {content}")
        return parts[content.part]

    def size_bytes(self, part: range) -> int:
        return states_bytes(self.optimizer, self.owned, part, self._updated, MASTER_BYTES * self.has_master)

    @property
    def _updated(self) -> str:
        return "fp32" if self.has_master else self.dtype

    @property
    def whole(self) -> range:
        return range(self.owned.num_parameters)

    def views(self, states: torch.Tensor, part: range) -> Iterator[View]:
        """Of a part's states (uint8), in flat order; where they lie region by region, as if of one parameter."""
        owned = Owned(((self.owned.num_parameters,),), False) if self.optimizer.is_flat else self.owned
        at = 0

        def take(size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
            nonlocal at
            at += size_bytes
            return states[at - size_bytes : at].view(dtype)

        for piece in pieces(self.optimizer, owned, part, self._updated):
            tensors, formats = {}, {}
            if self.has_master:
                tensors["master"] = take(MASTER_BYTES * len(piece.values), torch.float32)
            for moment in piece.moments:
                form = FORMATS[moment.format]
                if form.is_coded:
                    formats[moment.name] = moment.format
                    num_codes = moment.num_values * form.bits // 8
                    tensors[moment.name] = take(num_codes, torch.uint8)
                    tensors[f"{moment.name} scales"] = take(moment.size_bytes - num_codes, torch.float32)
                else:
                    tensors[moment.name] = take(moment.size_bytes, TORCH_DTYPES[moment.format])
            shape = owned.shapes[piece.index]
            if len(piece.values) < prod(shape):
                shape = ()
            yield View(piece.index, piece.begin, len(piece.values), shape, tensors, formats, piece.values.start)

    def cut(self, whole: torch.Tensor, part: range) -> torch.Tensor:
        """A copy of one part of a unit's states; uint8."""
        states = torch.empty(self.size_bytes(part), dtype=torch.uint8)
        for of_whole, of_part in self._pairs(whole, self.whole, states, part):
            of_part.copy_(of_whole)
        return states

    def join(self, parts: Sequence[torch.Tensor], ranges: Sequence[range]) -> torch.Tensor:
        """The states of neighbouring parts, in order, as one; uint8."""
        if len(parts) == 1:
            return parts[0]
        of = range(ranges[0].start, ranges[-1].stop)
        whole = torch.empty(self.size_bytes(of), dtype=torch.uint8)
        for states, part in zip(parts, ranges, strict=True):
            for of_whole, of_part in self._pairs(whole, of, states, part):
                of_whole.copy_(of_part)
        return whole

    def _pairs(
        self, whole: torch.Tensor, of: range, states: torch.Tensor, part: range
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        views = {view.index: view for view in self.views(whole, of)}
        for view in self.views(states, part):
            of_whole = views[view.index]
            begin = view.begin - of_whole.begin
            for name, tensor in view.tensors.items():
                yield of_whole._some(of_whole.tensors[name], begin, begin + view.length), tensor


def layout_of(
    spec: str, shapes: Sequence[Sequence[int]], dtype: str, *, is_block: bool, has_master: bool
) -> StateLayout:
    """The layout of a unit with parameters of these shapes, in flat order."""
    return StateLayout(optimizer_of(spec), Owned(tuple(map(tuple, shapes)), is_block), dtype, has_master)
