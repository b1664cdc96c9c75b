"""Amounts whose order of magnitude says that a unit is missing or wrong are refused, with what was probably meant."""

from __future__ import annotations

import re

import pytest

from tests.hwmodels.test_description import PLAIN, machine_of
from tierplan.hwmodels import MachineError, load_description, load_machine
from tierplan.hwmodels.description import KEYS


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("gpu.peak_bf16=165", 'did you mean "165 TFLOP/s"'),
        ("link.h2d=25", 'did you mean "25 GB/s"'),
        ("host.capacity=64", 'did you mean "64 GiB"'),
        ("host.capacity=64 B", 'did you mean "64 GiB"'),
        ("host.adam=1.8", 'did you mean "1.8 G/s"'),
        ("gpu.peak_bf16=165e15", "which nothing reaches; check its unit"),
        ("gpu.memory_bandwidth=300 TB/s", "which nothing reaches; check its unit"),
        (
            "link.h2d=25000 GB/s",
            "link.h2d in --set is '25000 GB/s', 25000 GB/s, which nothing reaches; check its unit",
        ),
        ("link.p2p=900000 GB/s", "which nothing reaches; check its unit"),
        ("gpu.latency=5", "gpu.latency in --set is '5', 5 s, which nothing reaches; did you mean \"5 us\"?"),
        ("gpu.latency=0.1", "'0.1', 100 ms, which nothing reaches; did you mean \"0.1 ms\"?"),
        ("nvme.latency=0.1 s", 'did you mean "0.1 ms"?'),
        ("link.latency=100 ms", 'did you mean "100 us"?'),
        ("gpu.launch=20", 'did you mean "20 us"?'),
        ("host.latency=0.6", 'did you mean "0.6 ms"?'),
        ("nvme.latency=5000", "5000 s, which nothing reaches; check its unit"),
        ("nvme.recovery=1e6", "which nothing reaches; check its unit"),
        (
            "link.h2d=[[1e6, 12], [1e9, 25]]",
            'the highest rate of link.h2d in --set is 25, 25 B/s; did you mean "25 GB/s"?',
        ),
        ("nvme.endurance=600", 'did you mean "600 TB"?'),
        ("nvme.endurance=600 GB", 'did you mean "600 TB"?'),
        ("nvme.endurance=0.999 TB", "'0.999 TB', 930.4 GiB, which is less than anything has; check its unit"),
        ("nvme.endurance=600GB", 'did you mean "600 TB"?'),
        ("link.h2d=0.5MB/s", 'did you mean "0.5 GB/s"?'),
        ("nvme.latency=100", 'did you mean "100 us"?'),
        ("gpu.memory_frac=80", "80; it is at most 1 (share of that bandwidth"),
        ("gpu.matmul_frac=1.5", "it is at most 1 (share of the peak"),
        ("gpu.collective_share=2", "it is at most 1 (share of a GPU's compute"),
        ("gpu.sustained_frac=1.2", "gpu.sustained_frac in --set is 1.2; it is at most 1 ("),
        ("gpu.sustained_frac=[[1e9, 0.8]]", "gpu.sustained_frac in --set is a list; this key takes one number"),
        ("nvme.mixed=5", "5; it is at most 2 (room for reads and writes together"),
        ("gpu.power=450 kW", "gpu.power in --set is '450 kW', 450000 W, which nothing reaches; check its unit"),
        ("host.power=90 kW", "which nothing reaches; check its unit"),
        ("nvme.power=7 kW", "which nothing reaches; check its unit"),
        ("gpu.power=0.45", 'did you mean "0.45 kW"?'),
        ("gpu.power=0.45W", 'did you mean "0.45 kW"?'),
        ("link.h2d=PCIe 5.0 x160", 'write it like "6.5 GB/s"'),
    ],
)
def test_an_implausible_amount_says_what_was_probably_meant(setting: str, meant: str) -> None:
    with pytest.raises(MachineError, match=re.escape(meant)):
        load_machine("desktop-4090", [setting])


def test_what_a_busy_processor_measures_is_taken() -> None:
    description = load_description("desktop-4090", ["gpu.attention_bf16=0.58 GFLOP/s"])
    assert description.number("gpu.attention_bf16") == 5.8e8


@pytest.mark.parametrize(
    ("setting", "shown"),
    [("gpu.price=12345", "12345 USD"), ("host.power=19999", "19999 W"), ("link.p2p=9.9999 TB/s", "10000 GB/s")],
)
def test_money_and_watts_have_no_exponents(setting: str, shown: str) -> None:
    name = setting.partition("=")[0]
    quantity = load_description("desktop-4090", [setting]).quantity(name)
    assert quantity is not None
    assert quantity.text(KEYS[name]) == shown


@pytest.mark.parametrize("number", ["inf", "nan"])
@pytest.mark.parametrize(
    ("entry", "name"),
    [
        (
            '[[limit]]\nname = "a"\nlimit = 1.0\ntakes = { "host.adam" = X }',
            r"limit\[0\] \('a'\): takes\['host.adam'\]",
        ),
        ('[[limit]]\nname = "a"\nlimit = X\ntakes = { "host.adam" = 1.0 }', r"limit\[0\] \('a'\): limit"),
        ('[[limit]]\nname = "a"\nlimit = 1.0\nspread = X\ntakes = { "host.adam" = 1.0 }', r"\('a'\): spread"),
        ('[shares]\n"nvme.read" = X', r"shares\['nvme.read'\]"),
    ],
)
def test_amounts_are_finite(entry: str, name: str, number: str) -> None:
    with pytest.raises(MachineError, match=rf"x.toml: .*{name} is {number}; it must be a number"):
        machine_of(PLAIN + entry.replace("X", number))
