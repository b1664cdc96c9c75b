"""What `auto` means for training settings, and where the amounts of a workload come from."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Literal

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, CORES_LIMIT
from tierplan.hwmodels.values.extras import what_brings
from tierplan.sim.workloads.models import read_config, workload_of
from tierplan.sim.workloads.workload import NotCovered, Training, Workload


def default_precision(machine: Machine) -> Literal["bf16", "fp16", "fp32"]:
    """The first of bf16, fp16, fp32 in which the machine's compute stream has a rate for matrix products."""
    rates = machine.stream(COMPUTE).rates
    names: tuple[Literal["bf16", "fp16", "fp32"], ...] = ("bf16", "fp16", "fp32")
    return next((name for name in names if f"matmul_{name}_flops" in rates), "fp32")


def default_backend(machine: Machine) -> Literal["cuda", "cpu"]:
    """`cpu` for a machine whose compute stream is the host's own cores, else `cuda`."""
    return "cpu" if CORES_LIMIT in machine.stream(COMPUTE).takes else "cuda"


def load_or_trace(model: str, training: Training, *, exact: bool = False) -> Workload:
    """The workload of a model by closed forms, or from its own class on fake tensors.

    The latter where `exact` asks for it, and for what the closed forms do not cover where torch is installed.
    """
    return workload_or_traced(*read_config(model, training), training, exact=exact)


def workload_or_traced(name: str, config: dict[str, object], training: Training, *, exact: bool = False) -> Workload:
    """As `load_or_trace`, where the config is at hand."""
    text = json.dumps(config)
    if not exact:
        try:
            return _covered(name, text, training)
        except NotCovered as error:
            if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
                raise NotCovered(f"{error}; {what_brings(missing[0], 'tracing')}") from None
    alone = replace(training, gradient_accumulation_steps=1)  # which changes no micro-batch
    return replace(_traced(name, text, alone), training=training)


@lru_cache(maxsize=256)
def _covered(name: str, config: str, training: Training) -> Workload:
    """Kept, as `_traced`: `advise` asks for the same one hundreds of times."""
    return workload_of(name, json.loads(config), training)


@lru_cache(maxsize=64)
def _traced(name: str, config: str, training: Training) -> Workload:
    """Takes seconds, so it is kept: by the config's text, since a file may change under the same path."""
    from tierplan.runtime.tracing.trace import trace_config

    return trace_config(name, json.loads(config), training, at=partial(_traced, name, config))
