"""Autograd's bookkeeping without tensors: what an operation computes, saves and allocates, from shapes alone.

A family writes its forward with these operations, in the order and with the local variables of its module in
`transformers`. A storage is released when Python drops the last reference to it, as in PyTorch, so the same mechanism
gives the peaks. Each operation states what autograd saves and how its backward allocates. `backward` then walks the
operations in reverse, as the autograd engine does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from tierplan.sim.workloads.families.slices import Meter, Operation, Recording
from tierplan.sim.workloads.formats import format_of
from tierplan.sim.workloads.optimizers import Shape, in_flat_order
from tierplan.sim.workloads.work import Amounts
from tierplan.sim.workloads.workload import DTYPE_BYTES, Training

ITEM_BYTES = {**DTYPE_BYTES, "bool": 1, "uint8": 1, "int64": 8, "uint64": 8, "fp64": 8}


class Storage:
    """Memory that lives as long as something refers to it."""

    __slots__ = ("dtype", "meter", "number", "owner", "size_bytes")

    def __init__(self, size_bytes: int, dtype: str, owner: str, meter: Meter | None, number: int) -> None:
        self.size_bytes, self.dtype, self.owner, self.meter, self.number = size_bytes, dtype, owner, meter, number
        if meter:
            meter.add(size_bytes)

    def __del__(self) -> None:
        if self.meter:
            self.meter.add(-self.size_bytes)


Backward = Callable[[Storage], Sequence[Storage | None]]
"""From the gradient of an output to those of the inputs; the closure holds what autograd saves, and no more."""


@dataclass(slots=True, eq=False)
class Node:
    """One differentiable operation: where its gradients go, and how they are made."""

    edges: tuple[Node | None, ...]
    """Per input: who made it, or None where no gradient is wanted."""
    backward: Backward | None
    numel: int
    """Elements of the output."""
    dtype: str
    is_view: bool = False
    """Gradients go through as parts of larger storages."""
    is_own: bool = False
    """A parameter of this unit."""


@dataclass(slots=True, eq=False)
class Value:
    """A tensor: a shape and dtype over a storage. Views share the storage."""

    shape: tuple[int, ...]
    dtype: str
    storage: Storage
    node: Node | None = None

    @property
    def needs_grad(self) -> bool:
        return self.node is not None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def view(self, *shape: int) -> Value:
        """The same memory in another shape."""
        return Value(shape, self.dtype, self.storage, self.node)

    @property
    def size_bytes(self) -> int:
        """Bytes that a kernel reads: those of an expanded tensor count once."""
        return min(self.numel * ITEM_BYTES[self.dtype], self.storage.size_bytes)


@dataclass(eq=False)
class Tape(Recording):
    """Records one unit's forward; `run_backward` then does the same for backward."""

    training: Training
    nodes: list[Node] = field(default_factory=list)
    held: list[Storage] = field(default_factory=list)
    num_parameters: int = 0
    num_frozen: int = 0
    coded_bytes: int = 0
    """Of frozen parameters in codes, over what they would take in the model's type: below zero."""
    rank: int = 0
    """Of the parameters that are made now: modules list those of lower rank first."""
    ranked: list[tuple[int, Shape]] = field(default_factory=list)
    """The unit's own parameters, in the order of their use."""
    shared_parameters: int = 0
    scope: str = ""
    _numbers: int = 0

    # ---- values ----

    def _storage(self, size_bytes: int, dtype: str, owner: str = "") -> Storage:
        self._numbers += 1
        return Storage(size_bytes, dtype, owner, None if owner else self.memory, self._numbers)

    def parameter(self, *shape: int, shared: bool = False, rank: int | None = None, adapts: bool = False) -> Value:
        """A parameter of this unit, or (`shared`) one that another unit owns; beside adapters all others are frozen."""
        is_frozen = bool(self.training.lora) and not adapts
        dtype = self.training.dtype_of_trained if adapts else self.training.dtype
        size = prod(shape)
        if shared:
            self.shared_parameters += size
        else:
            self.num_parameters += size
            self.num_frozen += size if is_frozen else 0
            self.ranked += [] if is_frozen else [(self.rank if rank is None else rank, shape)]
        leaf = None if is_frozen else Node((), None, size, dtype, is_own=not shared)
        return Value(shape, dtype, self._storage(size * ITEM_BYTES[dtype], dtype, "parameter"), leaf)

    def codes(self, num_rows: int, num_columns: int, base: str) -> Value:
        """A frozen weight of this unit that lies in codes."""
        size, size_bytes = num_rows * num_columns, format_of(base).size_bytes(num_rows * num_columns, num_rows)
        self.keep(size)
        self.coded_bytes += size_bytes - size * DTYPE_BYTES[self.training.dtype]
        return Value((size_bytes,), "uint8", self._storage(size_bytes, "uint8", "parameter"))

    def keep(self, num_parameters: int) -> None:
        """Frozen parameters of this unit that no operation reads."""
        self.num_parameters += num_parameters
        self.num_frozen += num_parameters

    def input(self, *shape: int, needs_grad: bool = True) -> Value:
        """The unit's input: it belongs to the unit before."""
        dtype = self.training.dtype
        leaf = Node((), None, prod(shape), dtype) if needs_grad else None
        return Value(shape, dtype, self._storage(prod(shape) * ITEM_BYTES[dtype], dtype, "input"), leaf)

    def outside(self, *shape: int, dtype: str | None = None) -> Value:
        """Something made once for all units: a mask, a rotary table, the labels."""
        dtype = dtype or self.training.dtype
        return Value(shape, dtype, self._storage(prod(shape) * ITEM_BYTES[dtype], dtype, "outside"))

    def hold(self, *values: Value) -> None:
        """Keeps values that later parts use, until the tape is gone."""
        self.held += [value.storage for value in values]

    def empty(self, shape: Sequence[int], dtype: str) -> Value:
        return Value(tuple(shape), dtype, self._storage(prod(shape) * ITEM_BYTES[dtype], dtype))

    def save(self, *values: Value) -> tuple[Storage, ...]:
        """What autograd keeps for backward; the result holds it."""
        for value in values:
            storage = value.storage
            self.saves_input |= storage.owner == "input"
            self.saves_parameters |= storage.owner == "parameter"
            if not storage.owner:
                self.note_saved(storage.number, storage.size_bytes, storage.dtype)
        return tuple(v.storage for v in values)

    # ---- recording ----

    def record(
        self,
        name: str,
        reads: Sequence[Value],
        writes: Sequence[Value],
        work: Amounts,
        random: bool = False,
        num_kernels: int = 1,
    ) -> None:
        name = f"{self.scope}/{name}" if self.scope else name
        read, written = (tuple(v.storage.number for v in values) for values in (reads, writes))
        self.note(Operation(name=name, reads=read, writes=written, work=work, random=random), num_kernels)

    def made(self, name: str, reads: Sequence[Value], shape: Sequence[int], dtype: str) -> Value:
        """The result of a memory-bound kernel, which moves the bytes of what it reads and its own."""
        out = self.empty(shape, dtype)
        self.record(name, reads, [out], self.moved(*reads, out))
        return out

    def connect(self, output: Value, inputs: Sequence[Value], backward: Backward) -> Value:
        """Makes `output` differentiable through `backward`, which returns one gradient per input."""
        if any(v.needs_grad for v in inputs):
            output.node = Node(tuple(v.node for v in inputs), backward, output.numel, output.dtype)
            self.nodes.append(output.node)
        return output

    def grad(self, numel: int, dtype: str) -> Storage:
        return self._storage(numel * ITEM_BYTES[dtype], dtype)

    def moved(self, *values: Value | Storage | int) -> dict[str, float]:
        """The work of a memory-bound kernel: bytes that it reads and writes, of tensors or as numbers."""
        return {"elementwise_bytes": sum(v if isinstance(v, int) else v.size_bytes for v in values)}

    # ---- backward ----

    def run_backward(self, output: Node) -> None:
        """Walks the operations in reverse; `memory` then has backward's peak, `backward_work` its work."""
        root = self.grad(output.numel, output.dtype)  # the unit behind handed it over: it is held throughout
        pending = {id(output): root}
        uses = Counter(id(leaf) for node in self.nodes for leaf in node.edges if leaf is not None and leaf.is_own)
        while self.nodes:
            node = self.nodes.pop()
            grad = pending.pop(id(node), None)
            if grad is None or node.backward is None:
                continue
            grads: list[Storage | None] = list(node.backward(grad))
            del grad
            node.backward = None  # releases what it saved
            self._reduce(node, grads)
            for i, target in enumerate(node.edges):
                new, grads[i] = grads[i], None
                if new is None or target is None:
                    continue
                old = pending.pop(id(target), None)
                if old is not None:
                    both = self.grad(target.numel, target.dtype)
                    self.backward_work.append({"elementwise_bytes": 3 * both.size_bytes})
                    new = both
                    del both, old
                pending[id(target)] = new
                del new
            for target in node.edges:
                if target is not None and target.is_own:
                    uses[id(target)] -= 1
                    if not uses[id(target)]:
                        self.memory.complete_bytes += pending[id(target)].size_bytes

    def _reduce(self, node: Node, grads: list[Storage | None]) -> None:
        """Gradients of what was broadcast are summed, once all of the operation's gradients are there."""
        for i, target in enumerate(node.edges):
            new = grads[i]
            if new is None or target is None:
                continue
            size_bytes = target.numel * ITEM_BYTES[target.dtype]
            if new.size_bytes > size_bytes and not node.is_view:
                grads[i] = self.grad(target.numel, target.dtype)
                self.backward_work.append({"elementwise_bytes": new.size_bytes + size_bytes})

    # ---- answers ----

    def shapes(self) -> tuple[Shape, ...]:
        """Of the unit's own parameters, in flat order."""
        ranked = sorted(self.ranked, key=lambda item: item[0])
        return tuple(in_flat_order((shape for _, shape in ranked), lambda shape: shape))
