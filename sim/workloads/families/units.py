"""The parts of a family's model, and how they become the units of a workload."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tierplan.sim.workloads.adapters import is_thin
from tierplan.sim.workloads.families.ops import derived, kernel, product, to_dtype
from tierplan.sim.workloads.families.tape import Storage, Tape, Value
from tierplan.sim.workloads.workload import DTYPE_BYTES, NotCovered, Training, Unit, WorkloadError


@dataclass(frozen=True, slots=True)
class Config:
    """A `config.json` with the several names that one thing has in different families."""

    raw: Mapping[str, object]

    def number(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise WorkloadError(
                    f"the config has no {name!r}; it is needed for model_type {self.raw['model_type']!r}"
                )
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WorkloadError(f"{name} is {value!r} in the config; it must be a whole number of 1 or more")
        return value

    def first(self, *names: str) -> int:
        for name in names:
            if self.raw.get(name) is not None:
                return self.number(name)
        raise WorkloadError(f"the config has none of {', '.join(names)}; give one of them")

    def text(self, name: str, default: str) -> str:
        return str(self.raw.get(name, default))

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.raw.get(name, default)
        if not isinstance(value, bool | None):
            raise WorkloadError(f"{name} is {value!r} in the config; it must be true or false")
        return bool(value)

    def fraction(self, name: str, default: float) -> float:
        value = self.raw.get(name, default)
        if not isinstance(value, (int, float)):
            return default
        if not 0 <= value <= 1:
            raise WorkloadError(f"{name} is {value!r} in the config; it must be between 0 and 1")
        return float(value)

    @property
    def hidden(self) -> int:
        return self.first("hidden_size", "n_embd", "d_model")

    @property
    def heads(self) -> int:
        return self.first("num_attention_heads", "n_head", "num_heads")

    @property
    def layers(self) -> int:
        return self.first("num_hidden_layers", "n_layer", "num_layers")

    @property
    def vocabulary(self) -> int:
        return self.number("vocab_size")

    @property
    def tied(self) -> bool:
        return self.flag("tie_word_embeddings", default=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model type computes, in terms of a tape."""

    embed: Callable[[Tape, Config, Value], Value]
    block: Callable[[Tape, Config, Value], Value]
    head: Callable[[Tape, Config, Value, Value], Value]
    shared: Callable[[Config, Training], int] = lambda config, training: 0
    """Bytes made once per micro-batch and used by every block."""
    check: Callable[[Config, Training], None] = lambda config, training: None
    """Raises `WorkloadError` for settings that the closed forms do not cover."""
    covers: Mapping[str, object] = field(default_factory=dict)
    """Fields of the config of which the closed forms have one value alone, which is that of the class."""
    layers: Collection[str] = ()
    """Names of linear layers that may have adapters."""
    words: str = ""
    """The embedding of which, as of `lm_head`, a copy may be trained beside adapters."""
    casts: bool = False
    """Adapters are covered under autocast, too."""
    has_head_dim: Callable[[Config], bool] = lambda config: False
    """Whether heads may be of another width than their share of the model's."""


COVERS: Mapping[str, object] = {"is_encoder_decoder": False, "return_dict": True}
"""As `Family.covers`, of every family."""


def check_fields(config: Config, family: Family) -> None:
    """Refuses what changes a model in a way that its closed forms do not have; the class itself may refuse it, too."""
    covered = {**COVERS, **family.covers}
    if config.raw.get("layer_types"):
        covered["layer_types"] = ["full_attention"] * config.layers
    for name, value in covered.items():
        if (given := config.raw.get(name, value)) != value:
            raise NotCovered(f"{name} is {given!r}; the closed forms cover {value!r}; use tracing (--exact)")
    if config.hidden % config.heads and not family.has_head_dim(config):
        raise NotCovered(
            f"the width of {config.hidden} is not a multiple of the {config.heads} heads, which the closed forms do "
            f"not cover for model_type {config.raw['model_type']!r}; change one of the two, or use tracing (--exact)"
        )


def position_ids(tape: Tape, length: int) -> Value:
    """0, 1, 2, ... as `transformers` makes them: counted, then moved on by the length of a cache."""
    return tape.made("add", [tape.made("arange", [], (length,), "int64")], (1, length), "int64")


def embedding(tape: Tape, ids: Value, rows: int, width: int, name: str = "", *, rank: int | None = None) -> Value:
    """A gather of rows; its gradient has the size of the whole table."""
    tape.num_modules += 1
    table = tape.parameter(rows, width, rank=rank, adapts=name in tape.training.saved_modules)
    saved = tape.save(ids) if table.needs_grad else ()
    out = tape.empty((*ids.shape, width), table.dtype)
    tape.record("embedding", [ids, table], [out], tape.moved(ids, out, out))
    size, dtype, id_bytes = table.numel, table.dtype, ids.size_bytes

    def backward(grad: Storage) -> Sequence[Storage | None]:
        assert saved
        table_grad = tape.grad(size, dtype)
        tape.backward_work.append(tape.moved(id_bytes, grad, table_grad))
        return [table_grad]

    return tape.connect(out, [table], backward)


def padded_labels(tape: Tape, labels: Value) -> Value:
    tape.scope = "loss"
    batch, length = labels.shape
    return tape.made("constant_pad_nd", [labels], (batch, length + 1), "int64")


def next_labels(tape: Tape, padded: Value) -> Value:
    """All but the first label of each sequence: contiguous where there is but one sequence."""
    batch, length = padded.shape[0], padded.shape[1] - 1
    if batch == 1:
        return padded.view(batch, length)
    shifted = tape.empty((batch, length), "int64")
    tape.record("clone", [padded], [shifted], tape.moved(shifted, shifted))
    return shifted


def chunked_loss(
    tape: Tape, hidden: Value, vocabulary: int, labels: Value, *, shared: bool, adapts: bool = False
) -> Value:
    """Cross entropy of the next token in fp32, with the logits of a part of the tokens at a time, as
    `runtime.autograd.chunked_loss` computes it."""
    width, dtype = hidden.shape[-1], hidden.dtype
    tape.num_modules += 1
    weight = tape.parameter(vocabulary, width, shared=shared, adapts=adapts)
    shifted = next_labels(tape, padded_labels(tape, labels))
    tokens = shifted.numel
    each = -(-tokens // tape.training.loss_chunks)
    parts = [min(each, tokens - begin) for begin in range(0, tokens, each)]
    product, item_bytes = f"matmul_{dtype}_flops", DTYPE_BYTES[dtype]

    def moved_if_thin(part: int) -> dict[str, float]:
        sizes = (part * width, width * vocabulary, part * vocabulary)
        is_so = is_thin(tape.training.lora, part, width, vocabulary)
        return {"elementwise_bytes": item_bytes * sum(sizes)} if is_so else {}

    chosen = tape.made("ne", [shifted], (tokens,), "bool")
    count = tape.made("sum", [chosen], (), "int64")
    del chosen
    total = tape.made("zeros", [], (), "fp32")
    for part in parts:
        flops = 2 * part * width * vocabulary
        logits = tape.empty((part, vocabulary), dtype)
        tape.record("mm", [hidden, weight], [logits], {product: flops} | moved_if_thin(part))
        wide, next_ones = to_dtype(tape, logits, "fp32"), Value((part,), "int64", shifted.storage)
        del logits
        log_probabilities = tape.made("_log_softmax", [wide], wide.shape, "fp32")
        loss, of_all = tape.empty((), "fp32"), tape.empty((), "fp32")
        work = tape.moved(log_probabilities, next_ones, loss, of_all)
        tape.record("nll_loss", [log_probabilities, next_ones], [loss, of_all], work)
        del log_probabilities, of_all
        tape.record("add_", [total, loss], [total], tape.moved(total, loss, total))
        del wide, loss
    held, wants_weight = tape.save(hidden, weight, shifted), weight.needs_grad

    def backward(grad: Storage) -> Sequence[Storage | None]:
        assert held
        hidden_grad, weight_grad = tape.grad(tokens * width, dtype), None
        tape.backward_work.append(tape.moved(hidden_grad))
        for part in parts:
            numel = part * vocabulary
            tape.backward_work.append(moved_if_thin(part))
            logits = tape.grad(numel, dtype)
            wide = tape.grad(numel, "fp32") if dtype != "fp32" else logits
            del logits
            probabilities = tape.grad(numel, "fp32")
            del wide
            counts = tape.grad(part, "bool")
            minus, places = tape.grad(part, "fp32"), tape.grad(part, "int64")
            del places
            factors = tape.grad(part, "fp32")
            del factors
            narrow = tape.grad(numel, dtype) if dtype != "fp32" else probabilities
            del probabilities
            if wants_weight and weight_grad is None:
                weight_grad = tape.grad(width * vocabulary, dtype)
                tape.backward_work.append(moved_if_thin(part))
            del narrow
            casts = 2 * (4 + item_bytes) if dtype != "fp32" else 0
            moved = numel * (8 + 8 + 8 + casts) + part * (9 + 16 + 4 + 12 + 5 + 4) + grad.size_bytes
            tape.backward_work += [{product: (2 + wants_weight) * 2 * numel * width}, {"elementwise_bytes": moved}]
        del counts, minus  # they live until they are made anew
        return [hidden_grad, weight_grad]

    summed = tape.connect(total, [hidden, weight], backward)
    mean = tape.empty((), "fp32")
    tape.record("div", [summed, count], [mean], tape.moved(summed, count, mean))
    return derived(tape, mean, summed, tape.save(count))


def cross_entropy(tape: Tape, logits: Value, labels: Value) -> Value:
    """The mean over tokens, in the dtype of the logits."""
    tape.scope = "loss"
    numel, dtype = logits.numel, logits.dtype
    log_probabilities = kernel(tape, logits, "_log_softmax", saves="output")
    loss, weight = tape.empty((), dtype), tape.empty((), dtype)
    tape.record(
        "nll_loss", [log_probabilities, labels], [loss, weight], tape.moved(log_probabilities, labels, loss, weight)
    )
    held = tape.save(log_probabilities, labels, weight)
    read_bytes = log_probabilities.size_bytes + labels.size_bytes + weight.size_bytes

    def loss_backward(grad: Storage) -> Sequence[Storage | None]:
        logits_grad = tape.grad(numel, dtype)
        tape.backward_work.append(tape.moved(read_bytes, grad, logits_grad))
        assert held
        return [logits_grad]

    return tape.connect(loss, [log_probabilities], loss_backward)


NO_NEXT_TOKEN = (
    "sequence_length is 1, but the loss of a causal model is that of the next token, which such a sequence has not, so "
    "that it is nan in plain training, too; give 2 or more (--seq)"
)


def causal_head(tape: Tape, config: Config, hidden: Value, labels: Value, *, tied: bool = True) -> Value:
    """Logits by the table of embeddings or (unless a config says otherwise, by `tied`) by a matrix, and the cross
    entropy of the next token in fp32, over shifted labels."""
    if tape.training.sequence_length == 1:
        raise WorkloadError(NO_NEXT_TOKEN)
    tied, saved = config.flag("tie_word_embeddings", default=tied), tape.training.saved_modules
    own, vocabulary = "lm_head" in saved, config.vocabulary
    if saved:  # copies are no longer tied; where their originals have no use, they count here
        tape.keep((len(saved) - tied) * vocabulary * hidden.shape[-1])
    shared = tied and not saved
    if tape.training.loss_chunks > 1:
        return chunked_loss(tape, hidden, vocabulary, labels, shared=shared, adapts=own)
    logits = product(tape, hidden, vocabulary, bias=False, shared=shared, adapts=own)
    wide, padded = to_dtype(tape, logits, "fp32"), padded_labels(tape, labels)  # they live until the loss is known
    return cross_entropy(tape, wide, next_labels(tape, padded))


def check_attention(config: Config, training: Training, dropout: str, default: float) -> None:
    """Refuses attention dropout on a CPU, which computes attention in another way then."""
    if training.backend == "cpu" and (probability := config.fraction(dropout, default)) > 0:
        raise NotCovered(
            f"{dropout} is {probability}: attention with dropout has no fused kernel on a CPU, which the closed forms "
            f"do not cover; set {dropout} to 0 in the config, or use tracing (--exact, tp.trace_workload)"
        )


def measure_unit(
    name: str,
    kind: str,
    training: Training,
    run: Callable[[Tape, Value], Value],
    shape: tuple[int, ...],
    *,
    passes_back: bool = True,
) -> Unit:
    """Runs one part on a fresh tape, forward and backward; below all that is trained, nothing is passed back."""
    tape = Tape(training)
    is_embed = kind == "embed"
    given = tape.outside(*shape, dtype="int64") if is_embed else tape.input(*shape, needs_grad=passes_back)
    out = run(tape, given)
    node, out_bytes = out.node, out.size_bytes
    loss_bytes = out_bytes if kind == "head" else 0
    input_bytes = 0 if is_embed else given.size_bytes
    forward_peak = tape.memory.peak_bytes
    passed_on = sum({s.number: s.size_bytes for s in tape.held if s.number not in tape.saves}.values())
    forward_work = max(0, forward_peak - tape.saved_bytes - (0 if loss_bytes else out_bytes) - passed_on)
    del out, given
    tape.memory.restart()
    before = tape.memory.live_bytes
    gradients = tape.num_parameters - tape.num_frozen
    if node is not None:
        tape.run_backward(node)
        gradients += 0 if training.lora else tape.shared_parameters
    granted = before + gradients * training.grad_bytes + (0 if loss_bytes or node is None else out_bytes)
    granted += input_bytes if passes_back else 0
    return Unit(
        name=name,
        kind=kind,  # type: ignore[arg-type]
        num_parameters=tape.num_parameters,
        num_frozen=tape.num_frozen,
        frozen_bytes=tape.num_frozen * DTYPE_BYTES[training.dtype] + tape.coded_bytes,
        shapes=tape.shapes(),
        shares="embed" if tape.shared_parameters else None,
        adds_to_shared=not (training.lora and tape.shared_parameters),
        input_bytes=input_bytes,
        output_bytes=0 if loss_bytes else out_bytes,
        forward_work_bytes=forward_work,
        **tape.amounts(granted),
    )
