"""One training step of a model, as amounts: what each part computes, saves for backward, and owns.

A `Workload` describes one micro-batch through an ordered chain of units: `embed`, blocks `L0` ... `Ln`, `head` (final
norm, output projection and loss). The planner decides what happens to each amount; nothing here says where it lives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from typing import Annotated, Literal, get_args

import msgspec

from tierplan.hwmodels.values.records import Count, check_record, made_plain
from tierplan.hwmodels.values.shown import Shown
from tierplan.sim.contents import part_ranges
from tierplan.sim.workloads.adapters import read_adapters
from tierplan.sim.workloads.formats import FORMATS, act_formats, bases
from tierplan.sim.workloads.optimizers import (
    FLOPS_PER_HOST_UPDATE,
    Optimizer,
    Owned,
    Shape,
    optimizer_of,
    state_parts,
    states_bytes,
    update_flops,
)
from tierplan.sim.workloads.work import Amounts, CommonWork, WorkBytes, flops_of, total_work

DType = Literal["fp32", "bf16", "fp16"]
MAX_SEQUENCES = 2**16
"""In one step: beyond any batch in use."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of a config that say how many experts a block has, whose matrices lie in one parameter."""
CODED_SHARE = 16
"""A saved tensor with less than one value in so many of the unit's activations is not coded."""
NOT_OF_AMOUNTS = (
    "gradient_accumulation_steps", "master_weights", "optimizer", "max_grad_norm", "activation_format",
)  # fmt: skip
"""Settings of training that change nothing in what units compute, save and own."""
DTYPE_BYTES: Mapping[str, int] = {dtype: FORMATS[dtype].bits // 8 for dtype in get_args(DType)}


class WorkloadError(ValueError):
    """A model or a training setting that cannot be described."""


class NotCovered(WorkloadError):
    """What the closed forms do not cover. Tracing may cover it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training settings, under the names that `transformers` users know."""

    per_device_train_batch_size: Count = 1
    """Sequences in one micro-batch."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches in one optimizer step."""
    sequence_length: Count = 1024
    dtype: DType = "bf16"
    """Of parameters, activations and gradients."""
    trained_dtype: DType | None = None
    """Of the parameters that are trained and of their gradients, where it is another; None for `dtype`, and for fp32
    where there are adapters, as PEFT has them, and no modules of the model are saved beside them."""
    autocast: Literal["", "bf16", "fp16"] = ""
    """In which products run that have weights in fp32, those of the model or of adapters on it: these are cast for each
    (`torch.autocast`, the Trainer's `bf16`). Empty for products of weights as they are. Simulated only."""
    master_weights: bool = True
    """An fp32 master copy of the parameters is among the optimizer states. Has no use in fp32."""
    optimizer: str = "adamw"
    """A name with options, as `tierplan.sim.workloads.optimizers` has them: `sgd:momentum=0.9`."""
    attention: Literal["flash", "plain"] = "flash"
    max_grad_norm: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Clip gradients by their global norm; None for no clipping."""
    padded: bool = False
    """Batches have an `attention_mask` in which something is 0: attention takes a mask, and with grouped queries a key
    and a value for each query."""
    loss: Literal["plain", "fused"] = "plain"
    """Cross entropy by PyTorch's kernels, in fp32; or by one that reads logits as they are and writes gradients in
    their place, as Liger's and compiled ones do. Fused is simulated only."""
    torch_compile: bool = False
    """Blocks run as kernels that `torch.compile` makes of all between products. Simulated only."""
    loss_chunks: Count = 1
    """Parts of a micro-batch's tokens whose logits are made one after the other; 1: those of all tokens at once."""
    backend: Literal["cpu", "cuda"] = "cuda"
    """Whose kernels run: PyTorch saves different tensors for backward on each."""
    lora: str = ""
    """Adapters to train, such as `r=16,targets=all-linear` (`adapters.read_adapters`); all else is frozen."""
    freeze: str = ""
    """Patterns of names of parameters that are not trained, with commas between."""
    base: str = ""
    """Format of the weights of frozen linear layers, all but the output matrix; empty for those in `dtype`."""
    activation_format: str = ""
    """Format in which activations leave the device; empty for that of their own. Changes the numbers."""

    def __post_init__(self) -> None:
        check_record(made_plain(self), WorkloadError)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "loss_chunks"):
            if (value := getattr(self, name)) > MAX_SEQUENCES:
                raise WorkloadError(f"{name} is {value:,}; no step has so many, give {MAX_SEQUENCES:,} or fewer")
        try:
            object.__setattr__(self, "optimizer", self.optim.spec)
            if self.lora:
                read_adapters(self.lora)
        except ValueError as error:
            raise WorkloadError(str(error)) from None
        if self.autocast and (self.base or self.dtype not in ("fp32", self.lora and self.autocast)):
            raise WorkloadError(
                f"autocast is {self.autocast!r}, which casts weights in fp32 for each product, but the model is in "
                f"{self.base or self.dtype!r}; give dtype fp32, or with adapters {self.autocast}, or leave out autocast"
            )
        if self.autocast and self.trained_dtype not in (None, "fp32"):
            raise WorkloadError(
                f"autocast is {self.autocast!r}, which casts trained weights in fp32, but trained_dtype is "
                f"{self.trained_dtype!r}; leave out one of the two"
            )
        if self.torch_compile and (self.autocast or self.padded or self.attention == "plain"):
            other = "autocast" if self.autocast else "padded" if self.padded else "give attention flash"
            raise WorkloadError(
                "torch_compile is described of blocks in one type with fused attention and no mask; leave it out, or "
                f"{other}"
            )
        if self.base and self.base not in bases():
            raise WorkloadError(
                f"base is {self.base!r}; choose one of {', '.join(bases())}, or none for weights in dtype"
            )
        if self.base and (exact_of := FORMATS[self.base].exact_of) not in ("", self.dtype):
            raise WorkloadError(
                f"base is {self.base!r}, which has the values of {exact_of} without loss, but the model is in "
                f"{self.dtype!r}; give dtype {exact_of}, or another base"
            )
        if self.base and not (self.lora or self.freeze):
            raise WorkloadError(
                f"base is {self.base!r}, but weights in codes cannot be trained; give adapters to train, such as lora "
                "r=16, or freeze those weights"
            )
        if self.activation_format and self.activation_format not in act_formats():
            raise WorkloadError(
                f"activation_format is {self.activation_format!r}; choose one of {', '.join(act_formats())}, or none "
                "for activations that leave as they are"
            )
        if self.saved_modules and self.dtype_of_trained != self.dtype:
            raise WorkloadError(
                f"trained_dtype is {self.trained_dtype!r}, but save={'+'.join(self.saved_modules)} trains modules of a "
                f"model in {self.dtype!r}; parameters that are trained are of one type: leave out trained_dtype"
            )
        if not self.optim.keeps_master and self.dtype_of_trained != "bf16":
            raise WorkloadError(
                f"optimizer {self.optimizer!r} keeps moments in the dtype of the weights, bf16, but that of trained "
                f"weights is {self.dtype_of_trained!r}; give dtype bf16, or another format of states"
            )

    @property
    def optim(self) -> Optimizer:
        return optimizer_of(self.optimizer)

    @property
    def precision(self) -> str:
        """Of what it computes with, in words."""
        return f"{self.dtype} with autocast to {self.autocast}" if self.autocast else self.dtype

    @property
    def has_master(self) -> bool:
        """Whether the states hold an fp32 copy of the parameters."""
        return self.master_weights and self.dtype_of_trained != "fp32" and self.optim.keeps_master

    @property
    def dtype_of_trained(self) -> DType:
        """Of the parameters that are trained, and of their gradients."""
        return self.trained_dtype or ("fp32" if self.lora and not self.saved_modules else self.dtype)

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """Modules of the model that are trained in full beside adapters."""
        return read_adapters(self.lora).save if self.lora else ()

    @property
    def updated_dtype(self) -> str:
        """Of what the optimizer updates."""
        return "fp32" if self.has_master else self.dtype_of_trained

    @property
    def param_bytes(self) -> int:
        """Bytes per trained parameter of the working copy."""
        return DTYPE_BYTES[self.dtype_of_trained]

    @property
    def grad_bytes(self) -> int:
        """Bytes per trained parameter of a gradient as backward makes it."""
        return self.param_bytes

    @property
    def flat_state_bytes(self) -> int:
        """Of one trained parameter, where states lie region by region."""
        return self.optim.flat_bytes + (4 if self.has_master else 0)

    def coded(self, unit: Unit, tensor: SavedTensor | None = None) -> tuple[int, int]:
        """Bytes of a saved tensor of a unit, or of its input, in the format in which activations leave, and those that
        an op reads and writes which codes or decodes it. (0, 0) for what leaves as it is.

        That are masks, integers, and what has less than one value in `CODED_SHARE` of the unit's activations: sums of
        norms and of attention, which need all their digits.
        """
        dtype, size_bytes = (self.dtype, unit.input_bytes) if tensor is None else (tensor.dtype, tensor.size_bytes)
        if not self.activation_format or dtype not in DTYPE_BYTES:
            return 0, 0
        num, form = size_bytes // DTYPE_BYTES[dtype], FORMATS[self.activation_format]
        if num * CODED_SHARE <= max(unit.input_bytes, unit.output_bytes) // DTYPE_BYTES[self.dtype]:
            return 0, 0
        return form.size_bytes(num), form.coding_bytes(num, DTYPE_BYTES[dtype])

    def moved_bytes(self, unit: Unit, tensor: SavedTensor | None = None) -> int:
        """With which a saved tensor of a unit, or its input, is moved between tiers."""
        return self.coded(unit, tensor)[0] or (unit.input_bytes if tensor is None else tensor.size_bytes)

    def params_bytes(self, unit: Unit) -> int:
        """Of a unit's parameters, trained and frozen."""
        return unit.num_trained * self.param_bytes + unit.frozen_bytes

    def states_bytes(self, unit: Unit, part: range | None = None) -> int:
        """Of a unit's optimizer states, or of those of some of its parameters: master copy (if any) and moments."""
        part = range(unit.num_trained) if part is None else part
        if self.optim.is_flat:
            return len(part) * self.flat_state_bytes
        return states_bytes(self.optim, unit.owned, part, self.updated_dtype, 4 if self.has_master else 0)

    def state_parts(self, unit: Unit, num_parts: int) -> Sequence[range]:
        """The parameters of each part in which a unit's states travel."""
        flat = num_parts == 1 or self.optim.is_flat or not unit.num_trained
        return part_ranges(unit.num_trained, num_parts) if flat else state_parts(self.optim, unit.owned, num_parts)

    def update_work(self, unit: Unit, part: range | None = None) -> Amounts:
        """Of a unit's update on a device, or of a part of it: states and parameters both ways, the gradient once, and
        matrix products."""
        part = range(unit.num_trained) if part is None else part
        moved = 2 * self.states_bytes(unit, part) + len(part) * (self.grad_bytes + 2 * self.param_bytes)
        flops = 0.0 if self.optim.is_flat else update_flops(self.optim, unit.owned, part)
        return {"elementwise_bytes": moved, **({"matmul_bf16_flops": flops} if flops else {})}

    def host_work(self, unit: Unit, part: range | None = None) -> Amounts:
        """Of the same, or of a part of it, on the host's cores, in parameters of fp32 Adam."""
        part, optim = range(unit.num_trained) if part is None else part, self.optim
        if optim.is_flat:
            return {"parameters": len(part) if optim.host_work == 1 else len(part) * optim.host_work}
        flops = update_flops(optim, unit.owned, part)
        return {"parameters": len(part) * optim.host_work + flops / FLOPS_PER_HOST_UPDATE}

    @property
    def tokens_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A storage that autograd keeps from forward to backward inside one unit, for one micro-batch.

    Deduplicated by storage; parameters, views of them, the unit's input and tensors from outside the unit are left out.
    """

    index: int
    """Order of first save inside the unit: `SavedActs.index`."""
    name: str
    """Producer, for people: `mlp.act/aten.mul`. Nothing matches on it."""
    size_bytes: int
    dtype: str
    recompute: Mapping[str, float] = field(default_factory=dict)
    """Work to make it again from `needs`, by work kind (`matmul_bf16_flops`, `elementwise_bytes`, ...)."""
    needs: tuple[int, ...] = ()
    """Saved tensors of this unit that the recomputation starts from, beside the unit's input and parameters."""
    replayable: bool = True
    """False where making it again would draw random numbers: then only a rerun of the whole unit does."""
    of_one_bytes: int | None = None
    """Size in a micro-batch of one sequence, where known: not always its share (positions do not grow with it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A part of the model that is executed, moved and planned as a whole. Amounts are for one micro-batch."""

    name: str
    """`embed`, `L0`, `L1`, ..., `head`."""
    kind: Literal["embed", "block", "head"]
    num_parameters: int
    """Parameters that this unit owns. A tied head owns none of the shared matrix."""
    num_frozen: int = 0
    """Those of them that are not trained: read, and never written. They have no gradients and no states."""
    frozen_bytes: int = 0
    """What these take, as they lie in a tier."""
    shares: str | None = None
    """Name of the unit whose parameters this one also uses (a tied head: `embed`)."""
    adds_to_shared: bool = True
    """Backward makes a gradient of what it shares; not so where that is frozen."""
    forward: Mapping[str, float]
    """Work by kind: `matmul_bf16_flops`, `attention_bf16_flops`, `elementwise_bytes`; or `s` where it was measured."""
    backward: Mapping[str, float]
    recompute: Mapping[str, float] | None = None
    """Work of making all saved tensors again, where it is known to be less than the whole forward: what comes after the
    last saved tensor need not run again."""
    num_kernels: int = 0
    """That forward launches, one by one; 0 where nobody counted them."""
    num_elementwise: int = 0
    """Of these kernels, those between products, which move bytes."""
    num_modules: int = 0
    """With parameters of their own, that forward calls; 0 where nobody counted them."""
    shapes: tuple[Shape, ...] = ()
    """Of the parameters that are trained, in flat order; empty where nobody knows them."""
    saved: tuple[SavedTensor, ...] = ()
    common: tuple[CommonWork, ...] = ()
    """Of `saved`: the outputs of one operation (attention has four), and what several tensors come from."""
    input_bytes: int = 0
    """Activations that the unit before hands over (token ids for `embed`: 0)."""
    output_bytes: int = 0
    """Activations handed to the next unit; the head's loss counts as 0."""
    saves_input: bool = True
    """Backward reads the unit's input."""
    saves_parameters: bool = True
    """Backward reads the unit's parameters. Not so where they are only tables of embeddings."""
    forward_work_bytes: int = 0
    """Live at forward's peak beyond parameters, input, saved tensors and output."""
    backward_work_bytes: int = 0
    """Live at backward's peak beyond parameters, input, saved tensors, output gradient, and all gradients it makes."""
    accumulating_work_bytes: int = 0
    """The same where the gradients of the unit's own parameters are added to earlier ones, which are there throughout;
    at least `backward_work_bytes`."""
    other_work_bytes: tuple[WorkBytes, ...] = ()
    """The same three in micro-batches of other sizes, where known: not in proportion, as gradients are of one size."""
    spread: float = 0.0
    """Relative standard deviation of measured times; 0 where they are modelled."""

    @property
    def num_trained(self) -> int:
        return self.num_parameters - self.num_frozen

    @property
    def is_frozen(self) -> bool:
        """Whether nothing of it is trained."""
        return 0 < self.num_frozen == self.num_parameters

    @property
    def saved_bytes(self) -> int:
        return sum(t.size_bytes for t in self.saved)

    def work_bytes(self, sequences: int) -> WorkBytes:
        """The three, where its micro-batch has so many sequences."""
        return WorkBytes(sequences, self.forward_work_bytes, self.backward_work_bytes, self.accumulating_work_bytes)

    @property
    def made_together(self) -> list[tuple[int, ...]]:
        """The saved tensors, those as one that the very same operations make: an output and its statistics."""
        groups: list[tuple[int, ...]] = [(t.index,) for t in self.saved]
        for common in self.common:
            if all(self.saved[k].recompute == common.work for k in common.tensors):
                groups = [alike for alike in groups if alike[0] not in common.tensors]
                groups.append(common.tensors)
        return groups

    def work_again(self, indices: Collection[int]) -> Amounts:
        """Of making these saved tensors again, each operation once, where the others are there."""
        works = [self.saved[k].recompute for k in indices]
        for common in self.common:
            times = len(set(indices).intersection(common.tensors))
            works += [{kind: -amount for kind, amount in common.work.items()}] * (times - 1)
        return {kind: amount for kind, amount in total_work(works).items() if amount}

    @property
    def owned(self) -> Owned:
        """The parameters that it trains, as an optimizer looks at them."""
        return Owned(self.shapes or ((self.num_trained,),), self.kind == "block")


def first_alike(units: Sequence[Unit]) -> list[int]:
    """By unit, the number of the first one that differs from it in no more than the name."""
    kinds: list[tuple[Unit, int]] = []
    firsts = []
    for u, unit in enumerate(units):
        nameless = replace(unit, name="")
        first = next((k for other, k in kinds if other == nameless), None)
        if first is None:
            kinds.append((nameless, first := u))
        firsts.append(first)
    return firsts


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(Shown):
    """An ordered chain of units with the settings they were computed for."""

    name: str
    model_type: str
    training: Training
    units: tuple[Unit, ...]
    shared_bytes: int = 0
    """Tensors made once per micro-batch and used by every block (masks, rotary tables): on the device throughout."""
    other_shared_bytes: tuple[tuple[int, int], ...] = ()  # numbers of sequences, and the same in so many
    config: Mapping[str, object] = field(default_factory=dict)
    """The `config.json` it came from: what the runtime builds the model from."""
    first_with_more: str | None = field(default=None, repr=False, compare=False)
    """The first unit, if there is one, that gets or gives other tensors beside the activations that go from each to the
    next: some with a gradient, or a block's without one. Only a trace looks for it."""
    computed_for: Training | None = field(default=None, repr=False, compare=False)
    """The settings that the amounts were computed for; None stands for `training`, and becomes it."""

    def __post_init__(self) -> None:
        self._check_settings()
        if not self.units:
            raise WorkloadError(f"workload {self.name!r} has no units; a model needs at least one")
        if len({u.name for u in self.units}) < len(self.units):
            raise WorkloadError(
                f"workload {self.name!r} runs a block several times in one forward, as ALBERT does, which no plan can "
                "say; choose a model whose blocks run once each"
            )
        if all(u.is_frozen or not u.num_parameters for u in self.units) and any(u.is_frozen for u in self.units):
            raise WorkloadError(f"all parameters of {self.name!r} are frozen; there is nothing to train")

    def _check_settings(self) -> None:
        """Whether the amounts are those of the settings: `replace` changes these alone."""
        new, old = self.training, self.computed_for or self.training
        object.__setattr__(self, "computed_for", old)
        if new is old:
            return
        names = (f.name for f in fields(Training) if f.name not in NOT_OF_AMOUNTS)
        if changed := [name for name in names if getattr(new, name) != getattr(old, name)]:
            name = changed[0]
            raise WorkloadError(
                f"workload {self.name!r} was computed for {name} {getattr(old, name)!r}, but is given "
                f"{getattr(new, name)!r} beside the same amounts; make it anew with these settings (load_workload, "
                "trace_workload), or where its units were computed anew, say computed_for=None"
            )

    @property
    def blocks(self) -> tuple[Unit, ...]:
        return tuple(u for u in self.units if u.kind == "block")

    @property
    def num_parameters(self) -> int:
        return sum(u.num_parameters for u in self.units)

    @property
    def num_active(self) -> int | None:
        """Parameters that a token meets: of experts, those that it is sent to; None where nobody knows."""
        counts = {count for name in EXPERTS if isinstance(count := self.config.get(name), int)}
        if counts and any(unit.num_frozen > max(counts) for unit in self.blocks):
            return None  # more than a number per expert is frozen: which parameters are experts' is not known
        experts = [shape for unit in self.units for shape in unit.shapes if len(shape) == 3 and shape[0] in counts]
        if not experts:
            return self.num_parameters
        if not isinstance(chosen := self.config.get("num_experts_per_tok"), int):
            return None
        return self.num_parameters - sum(prod(shape[1:]) * (shape[0] - chosen) for shape in experts)

    @property
    def states_bytes(self) -> int:
        return sum(self.training.states_bytes(u) for u in self.units)

    @property
    def num_trained(self) -> int:
        return sum(u.num_trained for u in self.units)

    @property
    def params_bytes(self) -> int:
        """Of all parameters, trained and frozen."""
        return sum(map(self.training.params_bytes, self.units))

    @property
    def flops(self) -> float:
        """Of one micro-batch's forward and backward, without logits that are made again where the loss is in chunks."""
        works = (work for unit in self.units for work in (unit.forward, unit.backward))
        return flops_of(total_work(works)) - (flops_of(self.units[-1].forward) if self.remakes_logits else 0)

    @property
    def remakes_logits(self) -> bool:
        """For a loss in chunks; a fused one makes gradients at once, but where the output matrix is not trained."""
        head, t = self.units[-1], self.training
        trains = head.num_trained > 0 or (head.shares is not None and head.adds_to_shared)
        return t.loss_chunks > 1 and not (t.loss == "fused" and trains)

    @property
    def first_trained(self) -> int:
        """The first unit with a backward: below it all is frozen, so nobody wants a gradient of what these make."""
        return next(u for u, unit in enumerate(self.units) if not unit.is_frozen)

    def record(self) -> dict[str, object]:
        """The workload as JSON values."""
        left_out = ("computed_for", "first_with_more")  # settings again, and what a new trace finds
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def rows(self) -> list[dict[str, object]]:
        """The units."""
        names = ("name", "kind", "num_parameters", "saved_bytes", "input_bytes", "output_bytes")
        return [{name: getattr(unit, name) for name in names} for unit in self.units]

    def __repr__(self) -> str:
        t, size = self.training, f"{self.num_parameters / 1e9:.3g} B parameters in {len(self.units)} units"
        size += f", {self.num_trained / 1e9:.3g} B trained" if self.num_trained < self.num_parameters else ""
        tokens = f"{t.per_device_train_batch_size} x {t.gradient_accumulation_steps} x {t.sequence_length} tokens"
        return f"<Workload {self.name}: {size}; {tokens}, {t.precision}>"
