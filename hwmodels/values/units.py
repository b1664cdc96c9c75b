"""Amounts with units as people write them: "256 GiB", "6.5 GB/s", "PCIe 4.0 x16", "20 us", "700 M/s"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from tierplan.hwmodels.machine import MachineError

Unit = Literal["bytes", "bytes/s", "flops/s", "parameters/s", "s", "USD", "W", "number", "count", "text"]

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SCALES = {**_DECIMAL, **_BINARY, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3}
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One PCIe lane, one direction, by generation, after line coding."""
LINK_FRAC = 0.8
"""Share of a link's rate that large copies of pinned memory reach."""
_NUMBER = re.compile(r"\s*(?P<number>[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>.*?)\s*$")

_WRITTEN: Mapping[str, tuple[re.Pattern[str], str]] = {
    "bytes": (re.compile(r"(?P<scale>[kKMGTP]i?)?B?$|bytes$"), '"256 GiB" (2**30 bytes) or "256 GB" (1e9 bytes)'),
    "bytes/s": (
        re.compile(r"(?P<scale>[kKMGTP]i?)?(?:B/s)?$|bytes/s$"),
        '"6.5 GB/s", or "PCIe 4.0 x16" for what its lanes carry in practice',
    ),
    "flops/s": (re.compile(r"(?P<scale>[kKMGTP])?(?:FLOPS|FLOP/s|flops/s|flop/s)?$"), '"165 TFLOP/s"'),
    "parameters/s": (re.compile(r"(?P<scale>[kKMGTP])? ?(?:/s|parameters/s)?$"), '"700 M/s"'),
    "s": (re.compile(r"(?:(?P<scale>[nuµm])?s)?$"), '"20 us"'),
    "USD": (re.compile(r"(?:USD)?$"), "1599"),
    "W": (re.compile(r"(?P<scale>k)?W?$"), "450"),
    "number": (re.compile(r"$"), "0.8"),
    "count": (re.compile(r"$"), "12"),
}
"""What may stand behind the number, and an example."""
_SHOWN: Mapping[str, tuple[Mapping[str, float], str]] = {
    "bytes": (_BINARY, "B"),
    "bytes/s": ({name: _DECIMAL[name] for name in ("", "k", "M", "G")}, "B/s"),
    "flops/s": (_DECIMAL, "FLOP/s"),
    "parameters/s": (_DECIMAL, " parameters/s"),
}


def parse_amount(value: object, unit: Unit, *, what: str) -> float:
    """`value` in base units (bytes, seconds, FLOP/s, ...). A bare number is taken to be in base units already.

    Raises `MachineError` that names `what` and shows how such an amount is written.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise MachineError(f"{what} is {value!r}; write a number or {_WRITTEN[unit][1]}")
    number = float(value) if isinstance(value, (int, float)) else _parse_text(value, unit, what)
    if not 0 <= number < float("inf"):
        raise MachineError(f"{what} is {value!r}; it must be a finite number, 0 or more")
    if unit == "count" and not number.is_integer():
        raise MachineError(f"{what} is {value!r}; it must be a whole number")
    return number


def _parse_text(value: str, unit: Unit, what: str) -> float:
    text = value.lstrip().removeprefix("$") if unit == "USD" else value
    if unit == "bytes/s" and (link := re.fullmatch(r"PCIe ([1-6])(?:\.0)? x(1|2|4|8|16)", text.strip(), re.IGNORECASE)):
        return LINK_FRAC * _LANE_BYTES_PER_S[int(link[1])] * int(link[2])
    suffix, example = _WRITTEN[unit]
    if not (match := _NUMBER.match(text)) or not (found := suffix.match(match["unit"])):
        raise MachineError(f"{what} is {value!r}; write it like {example}")
    return float(match["number"]) * _SCALES[found.groupdict().get("scale") or ""]


def leading_number(text: str) -> str:
    """The number in front of an amount's unit."""
    found = _NUMBER.match(text.lstrip("$"))
    return found["number"] if found else text


def format_amount(value: float, unit: Unit) -> str:
    """A short text for people, to about four digits, no exponent below 1e9; memory in GiB, rates in decimal units."""
    if unit == "count":
        return f"{int(value)}"
    if unit in _SHOWN:
        return _scaled(value, *_SHOWN[unit])
    if unit == "s":
        for name, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
            if value >= scale:
                return f"{value / scale:.4g} {name}"
        return f"{value * 1e9:.4g} ns"
    return _plain(value) + {"USD": " USD", "W": " W"}.get(unit, "")


def _scaled(value: float, scales: Mapping[str, float], unit: str) -> str:
    chosen, factor = "", 1.0
    for name, scale in scales.items():
        if name != "K" and value >= scale >= factor:
            chosen, factor = name, scale
    return f"{_plain(value / factor)} {chosen}{unit}".replace("  ", " ")


def _plain(value: float) -> str:
    text = f"{value:.4g}"
    return f"{value:.0f}" if "e+" in text and value < 1e9 else text
