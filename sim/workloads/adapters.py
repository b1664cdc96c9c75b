"""Adapters as text, `r=16,targets=all-linear`: the one place where it is read.

Names and defaults are PEFT's. What an adapter adds to a model is PEFT's own code (`tierplan.runtime.tracing.models`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

METHODS = ("lora", "dora", "ia3")
FORM = "r=16,alpha=32,targets=all-linear,dropout=0.05,method=lora,save=embed_tokens+lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """What is added to a model whose own parameters are frozen."""

    method: str = "lora"
    r: int = 8
    alpha: float = 8.0
    targets: tuple[str, ...] = ()
    """Names of linear layers, or `all-linear`: all but the output matrix; none for PEFT's choice for the family."""
    dropout: float = 0.0
    feedforward: tuple[str, ...] = ()
    """Those of IA3's targets whose input is scaled, not their output; none for PEFT's choice for the family."""
    save: tuple[str, ...] = ()
    """Names of modules (PEFT's `modules_to_save`) of which a copy is trained in full, in the type of the model, and
    saved; the original is kept beside it, and the adapters are of that type too."""


@lru_cache(maxsize=256)
def read_adapters(text: str) -> Adapters:
    """The adapters of a text such as `r=16,targets=q_proj+v_proj`. Raises `ValueError` for any other text."""
    given: dict[str, Any] = {}
    kinds: dict[str, Callable[[str], Any]] = {"r": int, "alpha": float, "dropout": float}
    kinds |= {"targets": _names, "feedforward": _names, "save": _names, "method": str}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key in given:
            raise ValueError(f"adapters {text!r} have {key} twice; leave one of them out")
        try:
            given[key] = kinds[key](value)
        except (KeyError, ValueError) as error:
            raise ValueError(f"adapters {text!r} have {part!r}; write them as {FORM}, or parts of it") from error
    adapters = Adapters(**{"targets": () if given.get("method") == "ia3" else ("all-linear",), **given})
    if adapters.method not in METHODS or adapters.r < 1 or not 0 <= adapters.dropout < 1 or adapters.alpha <= 0:
        raise ValueError(
            f"adapters {text!r}: the method is one of {', '.join(METHODS)}, r is 1 or more, alpha above 0, and dropout "
            "at least 0 and below 1"
        )
    if adapters.method == "ia3" and (of_ranks := [key for key in ("r", "alpha", "dropout") if key in given]):
        raise ValueError(f"adapters {text!r} have {of_ranks[0]}, which method=ia3 has not; leave it out")
    if adapters.feedforward and adapters.method != "ia3":
        raise ValueError(f"adapters {text!r} have feedforward layers, which are those of method=ia3; leave them out")
    return adapters


def is_thin(lora: str, *sides: int) -> bool:
    """Whether a product with these sides beside these adapters (as text, or none) has one that is no longer than the
    adapters' rank. Memory bounds those: their work is FLOPs and the bytes that they read and write.

    Measured ones of ranks 32 to 128, 512 to 16,384 tokens and sides of 2,048 to 12,288 (aiconfigurator's tables) take
    0.75 to 1.2 of both together on A100, 0.62 to 1.0 on H100, and on L40S where its cache does not hold them. FLOPs
    alone would be a tenth to a half of that.
    """
    return bool(lora) and min(sides) <= read_adapters(lora).r


def _names(value: str) -> tuple[str, ...]:
    if not value:
        raise ValueError("no targets")
    return tuple(dict.fromkeys(value.split("+")))
