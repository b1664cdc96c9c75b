"""Machine files: what may be written, what `--set` changes, and what is said when it is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierplan.hwmodels import MachineError, load_description, load_machine
from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.description import KEYS, Description, Quantity, parse_description, write_description
from tierplan.hwmodels.values.units import format_amount, parse_amount
from tierplan.planner.several_devices.collectives import collective_work
from tierplan.sim.sharing import max_min_speeds

PLAIN = """
name = "plain"
[gpu]
capacity = "24 GB"
matmul_bf16 = [[1e9, "20 TFLOP/s"], [1e12, "100 TFLOP/s"]]
memory_bandwidth = "1 TB/s"
[link]
h2d = "20 GB/s"
d2h = "10 GB/s"
[host]
capacity = 64_000_000_000
adam = "500 M/s"
[nvme]
drives = 2
capacity = "1 TB"
read = "5 GB/s"
write = "3 GB/s"
"""

ANOTHER = {
    "bytes": "12 GB", "bytes/s": "1.5 GB/s", "flops/s": "7 TFLOP/s", "parameters/s": "77 M/s", "s": "3 ms",
    "USD": "99", "W": "55", "number": "0.5", "count": "2",
}  # fmt: skip
"""A value for `--set` of each unit, other than any in `PLAIN`."""


def plain(**settings: str) -> Description:
    return parse_description(PLAIN, where="plain.toml")


def machine_of(text: str):  # type: ignore[no-untyped-def]
    return build_machine(parse_description(text, where="x.toml"))


# ---- amounts


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("256 GiB", "bytes", 256 * 2**30),
        ("256GB", "bytes", 256e9),
        ("1.5e3", "bytes", 1500),
        ("6.5 GB/s", "bytes/s", 6.5e9),
        ("11.5 GiB/s", "bytes/s", 11.5 * 2**30),
        ("PCIe 4.0 x16", "bytes/s", 0.8 * 16 * 1.969e9),
        ("PCIe 5 x4", "bytes/s", 0.8 * 4 * 3.938e9),
        ("165 TFLOPS", "flops/s", 165e12),
        ("700 M/s", "parameters/s", 700e6),
        ("20 us", "s", 20e-6),
        ("0.5", "s", 0.5),
        ("$1,599".replace(",", ""), "USD", 1599),
        ("450 W", "W", 450),
        (12, "count", 12),
    ],
)
def test_amounts_are_read_with_their_units(text: object, unit: str, value: float) -> None:
    assert parse_amount(text, unit, what="x") == pytest.approx(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("12 GB", "s"),
        ("PCIe 9.0 x4", "bytes/s"),
        ("PCIe 4.0 x4", "bytes"),
        ("-3", "bytes"),
        ("fast", "bytes/s"),
        ("1.5", "count"),
        (True, "count"),
        (None, "bytes"),
        ("nan", "W"),
        (float("nan"), "count"),
        (float("inf"), "count"),
    ],
)
def test_wrong_amounts_show_how_they_are_written(text: object, unit: str) -> None:
    with pytest.raises(MachineError, match=r"key\.x is"):
        parse_amount(text, unit, what="key.x")  # type: ignore[arg-type]


@given(st.floats(1e-9, 1e18), st.sampled_from(["bytes", "bytes/s", "flops/s", "parameters/s", "s", "W"]))
def test_what_is_shown_is_read_back(value: float, unit: str) -> None:
    assert parse_amount(format_amount(value, unit), unit, what="x") == pytest.approx(value, rel=1e-3, abs=1e-12)  # type: ignore[arg-type]


# ---- files


def test_a_plain_file_makes_a_machine() -> None:
    machine = machine_of(PLAIN)
    assert [s.name for s in machine.streams] == [
        "gpu0.compute", "gpu0.h2d", "gpu0.d2h", "nvme.read", "nvme.write", "host.adam",
    ]  # fmt: skip
    assert machine.tier("nvme").capacity_bytes == 2e12
    assert machine.tier("gpu0").capacity_bytes == 24e9 - 2**30
    assert machine.stream("nvme.read").rates["bytes"].at(1e9) == 10e9
    assert machine.stream("gpu0.compute").rates["matmul_bf16_flops"].at(5e12) == 100e12
    assert machine.stream("gpu0.compute").rates["matmul_bf16_flops"].at(1e9) == 20e12
    assert "matmul_fp32_flops" not in machine.stream("gpu0.compute").rates
    assert machine.nameplate == ()


def test_a_drives_reads_and_writes_take_turns_unless_said_otherwise() -> None:
    machine = machine_of(PLAIN)
    read, write = machine.stream("nvme.read"), machine.stream("nvme.write")
    assert machine.limits["nvme"] == 1.0
    assert read.takes["nvme"]["bytes"] * 10e9 == pytest.approx(1.0)
    assert write.takes["nvme"]["bytes"] * 6e9 == pytest.approx(1.0)
    assert "nvme" not in machine_of(PLAIN + "mixed = 2.0\n").limits


def test_dram_is_shared_by_copies_files_and_adam() -> None:
    machine = machine_of(PLAIN.replace("[host]", '[host]\nmemory_bandwidth = "30 GB/s"'))
    assert machine.limits["dram"] == 30e9
    takes = {s.name: s.takes["dram"] for s in machine.streams if "dram" in s.takes}
    assert takes["host.adam"]["parameters"] == 30
    assert {n: t["bytes"] for n, t in takes.items() if "bytes" in t} == dict.fromkeys(
        ("gpu0.h2d", "gpu0.d2h", "nvme.read", "nvme.write"), 1.0
    )


SWITCHES = """
[[switch]]
name = "a"
limit = "30 GB/s"
members = ["gpu0", "gpu1", "nvme"]
[[switch]]
name = "b"
limit = "25 GB/s"
members = ["gpu2", "gpu3"]
"""


SOCKETS = """
[[switch]]
name = "socket1"
limit = "40 GB/s"
members = ["b", "nvme"]
"""
"""A switch and drives on a second socket, whose buffers lie on the first."""


def test_devices_of_a_second_socket_share_the_link_between_sockets() -> None:
    four = PLAIN.replace("[gpu]", "[gpu]\ncount = 4").replace("[link]", '[link]\np2p = "15 GB/s"')
    machine = machine_of(four + SWITCHES.replace(', "nvme"', "") + SOCKETS)
    loads = lambda limit: {s.name for s in machine.streams if limit in s.takes}  # noqa: E731
    across = {f"gpu{i}.p2p.gpu{j}" for i in (2, 3) for j in (0, 1)}
    assert loads("switch.socket1.up") - across == {
        "gpu2.d2h",
        "gpu3.d2h",
        "nvme.read",
        "gpu2.collective",
        "gpu3.collective",
    }
    assert loads("switch.socket1.up") & across == loads("switch.b.up") & across == across
    assert machine.limits["switch.socket1.down"] == 40e9
    circle = SWITCHES.replace('"gpu3"]', '"c"]') + '[[switch]]\nname = "c"\nlimit = "9 GB/s"\nmembers = ["b"]\n'
    twice = SWITCHES.replace('name = "b"', 'name = "a"')
    for wrong, says in (
        (circle, "is behind itself: b behind c behind b"),
        (twice, "two shared limits 'switch.a.down'"),
    ):
        with pytest.raises(MachineError, match=says):
            machine_of(four + wrong)


def test_a_switch_is_shared_by_direction() -> None:
    four = PLAIN.replace("[gpu]", "[gpu]\ncount = 4").replace("[link]", '[link]\np2p = "15 GB/s"')
    machine = machine_of(four + SWITCHES)
    loads = lambda limit: {s.name for s in machine.streams if limit in s.takes}  # noqa: E731
    down_across = {f"gpu{i}.p2p.gpu{j}" for i in (2, 3) for j in (0, 1)}
    rings = {"gpu0.collective", "gpu1.collective"}
    assert loads("switch.a.down") == {"gpu0.h2d", "gpu1.h2d", "nvme.write"} | down_across | rings
    up_across = {f"gpu{i}.p2p.gpu{j}" for i in (0, 1) for j in (2, 3)}
    assert loads("switch.a.up") == {"gpu0.d2h", "gpu1.d2h", "nvme.read"} | up_across | rings
    assert loads("switch.b.down") == {f"gpu{i}.{way}" for i in (2, 3) for way in ("h2d", "collective")} | up_across
    assert machine.stream("gpu2.collective").takes["switch.b.up"]["ring4_bytes"] == 0.5, "a ring leaves it once"
    assert loads("gpu2.link.in") == {"gpu2.h2d", "gpu2.collective", *(f"gpu{i}.p2p.gpu2" for i in (0, 1, 3))}
    fabric = machine_of(four.replace("[link]", '[link]\np2p_path = "own"') + SWITCHES)
    assert "switch.a.down" not in fabric.stream("gpu2.p2p.gpu0").takes
    assert "gpu2.link.in" not in fabric.limits


def test_a_collective_runs_at_the_rate_of_its_number_of_gpus() -> None:
    """An all-reduce of B bytes over n GPUs: each sends 2 (n - 1) / n of them, in 2 (n - 1) steps."""
    measured = PLAIN.replace("[gpu]", "[gpu]\ncount = 8").replace(
        "[link]", '[link]\ncollective = [[2, "16 GB/s"], [8, "4 GB/s"]]\ncollective_latency = 1e-5'
    )
    machine = machine_of(measured)
    for num, rate in ((2, 16e9), (4, 8e9), (8, 4e9)):
        cost = machine.cost("gpu0.collective", collective_work("all_reduce", 1e9, num))
        assert cost.work_s == pytest.approx(2 * (num - 1) * (1e9 / num / rate + 1e-5))
    shown = parse_description(measured, where="x").values["link.collective"].text(KEYS["link.collective"])
    assert shown == "16 GB/s (at 2 GPUs) to 4 GB/s (at 8 GPUs)"
    with pytest.raises(MachineError, match=r"an amount of link.collective in x is '2 MB'; write it like 12"):
        parse_description(measured.replace('[2, "16', '["2 MB", "16'), where="x")


def test_gpus_without_links_or_measurements_share_the_host() -> None:
    eight = PLAIN.replace("[gpu]", "[gpu]\ncount = 8").replace("[link]", '[link]\nhost_d2h = "20 GB/s"')
    assert machine_of(eight).stream("gpu0.collective").rates["ring8_bytes"].at(1) == 20e9 / 8
    ring = machine_of(eight).stream("gpu0.collective").takes
    assert ring["gpu0.link.in"]["ring8_bytes"] == ring["gpu0.link.out"]["ring2_bytes"] == 1


def test_a_collective_takes_its_share_of_compute() -> None:
    machine = machine_of(PLAIN.replace("[gpu]", "[gpu]\ncount = 2\ncollective_share = 0.25"))
    costs = [machine.cost("gpu0.compute", {"s": 1.0}), machine.cost("gpu0.collective", {"ring2_bytes": 1e12})]
    speeds = max_min_speeds([cost.demand for cost in costs], [cost.share for cost in costs], machine.limits)
    assert speeds == pytest.approx([0.75, 1.0])


def test_a_listed_limit_is_in_fractions_of_full_speed() -> None:
    text = PLAIN + '[[limit]]\nname = "cores"\nlimit = 1.0\ntakes = { "gpu0.compute" = 1.0, "host.adam" = 0.5 }\n'
    machine = machine_of(text)
    assert machine.cost("host.adam", {"parameters": 5e8}).demand["cores"] == pytest.approx(0.5)
    assert machine.cost("gpu0.compute", {"s": 3.0}).demand["cores"] == pytest.approx(1.0)


def test_a_measured_machine_may_be_asked_about_without_its_drives() -> None:
    text = PLAIN + '[[limit]]\nname = "cores"\nlimit = 1.0\ntakes = { "nvme.read" = 0.3, "host.adam" = 0.5 }\n'
    machine = machine_of(text.replace("drives = 2", "drives = 0") + '[shares]\n"nvme.read" = 2\n')
    assert machine.cost("host.adam", {"parameters": 5e8}).demand["cores"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "plain"', "name = ", "is not TOML"),
        ("[gpu]", "[gpus]", "unknown field 'gpus'"),
        ("drives = 2", "drive = 2", "did you mean nvme.drives"),
        ('"24 GB"', '{ value = "24 GB", sorce = "x" }', "'sorce'"),
        (
            '"24 GB"',
            '{ value = "24 GB", basis = "guess" }',
            "gpu.capacity.basis is 'guess'; it must be one of",
        ),
        ('"24 GB"', '{ source = "x" }', "gpu.capacity lacks the field 'value'"),
        ('"24 GB"', "[[1, 2]]", "takes one number"),
        ("[1e12,", "[1e8,", "rising amounts"),
        ('"500 M/s"', '"0"', "host.adam .* is '0'; it must be above 0"),
        ("[gpu]", '[shares]\n"nvme.raed" = 2\n[gpu]', "name stream 'nvme.raed'; it has .*nvme.read"),
        ("adam =", "#", "does not say host.adam"),
        ('memory_bandwidth = "1 TB/s"', "", r"does not say gpu.memory_bandwidth \(.*; add it$"),
        ("read =", "#", r"does not say nvme.read .*that it has none \(nvme.drives = 0\)"),
        ('capacity = "24 GB"', 'capacity = "0.5 GB"', "is 1 GiB, not less than gpu.capacity, 476.8 MiB"),
        ("[gpu]", '[[switch]]\nname = "a"\n[gpu]', r"switch\[0\] \('a'\) lacks the field 'limit'"),
        ("drives = 2", "drives = 2\nread_share = 0", "must be above 0"),
        ("[host]", "[host]\nrounding = 'up'", "choose among exact, page, power-of-two"),
        (
            "[gpu]",
            '[[limit]]\nname = "x"\nlimit = 1\ntakes = { "gpu1.compute" = 1 }\n[gpu]',
            "names stream 'gpu1.compute'",
        ),
        (
            "[gpu]",
            '[[limit]]\nname = "nvme"\nlimit = 1\ntakes = { "nvme.read" = 1 }\n[gpu]',
            "has two shared limits 'nvme'",
        ),
        (
            "[gpu]",
            '[[limit]]\nname = "cores"\nlimit = 0\ntakes = { "host.adam" = 1 }\n[gpu]',
            "shared limit 'cores' of machine 'plain' is 0; it must be above 0",
        ),
        (
            "[gpu]",
            '[[switch]]\nname = "a"\nlimit = "0 B/s"\nmembers = ["gpu0"]\n[gpu]',
            "shared limit 'switch.a.down' of machine 'plain' is 0; it must be above 0",
        ),
        ('name = "plain"', 'name = "plain"\nswitch = 3', "switch is 3; it must be a list"),
        ('name = "plain"', 'name = "plain"\nlimit = { name = "x" }', "limit is {'name': 'x'}; it must be a list"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(old: str, new: str, message: str) -> None:
    assert old in PLAIN
    with pytest.raises(MachineError, match=message):
        machine_of(PLAIN.replace(old, new, 1))


def test_unknown_machines_and_parts_list_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="did you mean 'desktop-4090'"):
        load_machine("desktop-409")
    with pytest.raises(MachineError, match="no machine file"):
        load_machine(str(tmp_path / "x.toml"))
    with pytest.raises(MachineError, match="it has 980-pro"):
        load_machine("laptop", ["nvme.part=970-pro"])


# ---- --set


@pytest.mark.parametrize("name", [name for name in KEYS if not KEYS[name].unless])
def test_every_key_can_be_set_and_has_its_effect(name: str) -> None:
    """The key's new value is the one that the machine is built from."""
    key = KEYS[name]
    base = "fuyou-4090"
    part = {"gpu.part": "h100-sxm-80gb", "gpu.relative": "l40s", "nvme.part": "990-pro"}
    word = part.get(name) or next((c for c in key.choices if c != key.default), "")
    value = word or ("600 TB" if name == "nvme.endurance" else ANOTHER[key.unit])
    description = load_description(base, [f"{name}={value}"])
    machine = build_machine(description)
    quantity = description.quantity(name)
    assert quantity is not None
    assert quantity.value == (word or parse_amount(value, key.unit, what=name))
    assert quantity.source == "--set"
    record = machine.description[name]
    assert isinstance(record, dict)
    assert record["value"] == quantity.value


@pytest.mark.parametrize(
    ("setting", "effect"),
    [
        ("gpu.capacity=10 GB", lambda m: m.tier("gpu0").capacity_bytes == 10e9 - 2**30),
        ("gpu.reserve=4 GB", lambda m: m.tier("gpu0").capacity_bytes == 24564 * 2**20 - 4e9),
        ("gpu.count=2", lambda m: m.stream("gpu1.h2d")),
        ("gpu.part=h100-sxm-80gb", lambda m: m.tier("gpu0").capacity_bytes == (81559 - 1024) * 2**20),
        ("gpu.peak_fp16=100 TFLOP/s", lambda m: rate(m, "gpu0.compute", "matmul_fp16_flops") == pytest.approx(85e12)),
        ("gpu.matmul_fp16=99 TFLOP/s", lambda m: rate(m, "gpu0.compute", "matmul_fp16_flops") == 99e12),
        ("gpu.attention_scale=0.5", lambda m: rate(m, "gpu0.compute", "attention_bf16_flops") == 45.5e12),
        ("gpu.attention_fp16=9e12", lambda m: rate(m, "gpu0.compute", "attention_fp16_flops") == 9e12),
        ("gpu.memory_bandwidth=1e12", lambda m: rate(m, "gpu0.compute", "elementwise_bytes") == 0.8e12),
        ("gpu.elementwise=5e11", lambda m: rate(m, "gpu0.compute", "elementwise_bytes") == 5e11),
        ("gpu.latency=1 ms", lambda m: m.stream("gpu0.compute").latency_s == 1e-3),
        ("link.h2d=12 GB/s", lambda m: rate(m, "gpu0.h2d", "bytes") == 12e9),
        ("link.h2d=[[1e6, 1e9], [1e9, 12e9]]", lambda m: m.stream("gpu0.h2d").rates["bytes"].at(1e6) == 1e9),
        ("link.h2d=PCIe 3.0 x8", lambda m: rate(m, "gpu0.h2d", "bytes") == pytest.approx(0.8 * 8 * 0.985e9)),
        ("link.both=30 GB/s", lambda m: m.limits["gpu0.link"] == 30e9),
        ("link.host_h2d=3 GB/s", lambda m: m.limits["host_link.h2d"] == 3e9),
        ("host.capacity=256 GiB", lambda m: m.tier("host").capacity_bytes == 248 * 2**30),
        ("host.memory_bandwidth=99 GB/s", lambda m: m.limits["dram"] == 99e9),
        ("host.adam=1 G/s", lambda m: rate(m, "host.adam", "parameters") == 1e9),
        ("host.rounding=power-of-two", lambda m: m.tier("host").rounding == "power-of-two"),
        ("nvme.drives=3", lambda m: rate(m, "nvme.read", "bytes") == 19.5e9),
        ("nvme.drives=0", lambda m: all(t.name != "nvme" for t in m.tiers)),
        ("nvme.part=990-pro", lambda m: rate(m, "nvme.read", "bytes") == pytest.approx(12 * 7.45e9)),
        ("nvme.read=1 GB/s", lambda m: rate(m, "nvme.read", "bytes") == 12e9),
        ("nvme.slot=PCIe 3.0 x4", lambda m: rate(m, "nvme.read", "bytes") == pytest.approx(12 * 0.8 * 4 * 0.985e9)),
        ("nvme.array_read=20 GB/s", lambda m: rate(m, "nvme.read", "bytes") == 20e9),
        ("nvme.mixed=1.5", lambda m: m.limits["nvme"] == 1.5),
        ("nvme.write_share=0.2", lambda m: m.stream("nvme.write").share == 0.2),
        ("nvme.latency=1 ms", lambda m: m.stream("nvme.read").latency_s == 1e-3),
    ],
)
def test_settings_change_the_machine(setting: str, effect) -> None:  # type: ignore[no-untyped-def]
    assert effect(load_machine("fuyou-4090", [setting]))


def rate(machine, stream: str, kind: str) -> float:  # type: ignore[no-untyped-def]
    return float(machine.stream(stream).rates[kind].at(1e15))


def test_nameplate_names_only_what_the_machine_depends_on() -> None:
    machine = load_machine("desktop-4090")
    assert {"nvme.read", "nvme.write", "gpu.memory_bandwidth"} <= set(machine.nameplate)
    assert "gpu.peak_bf16" not in machine.nameplate, "its matmuls are measured"
    assert "gpu.peak_fp16" in load_machine("desktop-4090", ["gpu.part=v100-pcie-32gb"]).nameplate
    assert not {"gpu.price", "gpu.power", "nvme.endurance"} & set(machine.nameplate)
    own = load_machine("desktop-4090", ["gpu.matmul_bf16=140 TFLOP/s", "nvme.drives=0"])
    assert "gpu.peak_bf16" not in own.nameplate
    assert not [name for name in own.nameplate if name.startswith("nvme")]


def test_settings_have_their_effect_in_any_order() -> None:
    settings = [
        "gpu.capacity=12 GiB", "gpu.part=rtx-3090", "gpu.matmul_bf16=50 TFLOP/s", "gpu.peak_bf16=71 TFLOP/s",
        "nvme.read=1 GB/s", "nvme.part=990-pro", "gpu.memory_bandwidth=800 GB/s",
    ]  # fmt: skip
    there, back = (load_description("fuyou-4090", order) for order in (settings, settings[::-1]))
    assert there.values == back.values
    assert there.number("gpu.capacity") == 12 * 2**30
    assert there.number("gpu.matmul_bf16") == 50e12
    assert there.number("nvme.read") == 1e9
    assert "nvme.mixed" not in there.values
    assert load_description("laptop", ["nvme.drives=2", "nvme.drives=3"]).number("nvme.drives") == 3


def test_another_part_drops_what_was_said_of_the_old_one() -> None:
    description = load_description("fuyou-4090", ["gpu.part=h100-sxm-80gb", "nvme.part=990-pro"])
    assert "gpu.matmul_fp16" not in description.values  # the calibration of the RTX 4090
    assert "nvme.mixed" not in description.values
    assert description.number("nvme.drives") == 12


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nvme.drive=3", "did you mean nvme.drives"),
        ("nvme.drives", "not key=value"),
        ("nvme.drives=", "not key=value"),
        ("nvme.drives=1.5", "must be a whole number"),
        ("gpu.count=0", "must be 1 or more"),
        ("link.p2p_path=air", "choose among pcie, own"),
        ("link.h2d=[[1e6, 1e9], [1e3, 2e9]]", "rising amounts"),
        ("link.h2d=[[1e6", "is not a list of points"),
        ("unheard.of=1", "the keys are gpu.part"),
        ("host.dram=64 GiB", r"did you mean host.capacity\?"),
        ("gpu.memory=24 GiB", r"did you mean gpu.capacity\?"),
        ("dram.size=64 GiB", r"did you mean host.capacity\?"),
        ("nvme.drives=1000000", "is 1000000; no machine has more than 128"),
        ("gpu.count=1000", "is 1000; no machine has more than 128"),
    ],
)
def test_a_wrong_setting_says_what_is_right(setting: str, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        load_machine("fuyou-4090", [setting])


# ---- round trip


@settings(max_examples=50)
@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40),
    st.floats(1e6, 1e12),
    st.floats(0, 10) | st.none(),
)
def test_whatever_a_source_says_it_is_read_back(source: str, value: float, spread: float | None) -> None:
    quantities = {
        "gpu.capacity": Quantity(value, "measured", source, spread),
        "link.h2d": Quantity(((1.0, value), (2.0, value)), "published", source, spread),
    }
    description = Description(name="n", summary=source, values=quantities, notes={"a b": [1, 2.5, source, True]})
    assert parse_description(write_description(description), where="x") == description


def test_a_description_with_everything_survives_the_round_trip() -> None:
    four = PLAIN.replace("[gpu]", "[gpu]\ncount = 4")
    text = four + SWITCHES + '[[limit]]\nname = "cores"\nlimit = 1.0\ntakes = { "host.adam" = 0.5 }\nspread = 0.1\n'
    text += '[shares]\n"host.adam" = 2.0\n[notes]\ndate = "today"\n'
    description = parse_description(text, where="plain.toml")
    assert parse_description(write_description(description), where="plain.toml") == description
    assert build_machine(description).stream("host.adam").share == 2.0


@pytest.mark.parametrize(
    "key",
    [
        *("gpu.peak_bf16", "link.both", "link.host_both", "host.memory_bandwidth", "nvme.slot", "nvme.array_read"),
        *("gpu.matmul_frac", "host.adam_traffic", "link.collective_latency", "host.cores"),
        *("gpu.sustained_frac", "gpu.attention_scale"),
        *("nvme.mixed", "nvme.endurance", "gpu.power", "host.power", "nvme.power"),
    ],
)
def test_a_limit_of_0_is_not_taken_for_none(key: str) -> None:
    with pytest.raises(MachineError, match=re.escape(f"{key} in --set is '0'; it must be above 0")):
        load_machine("desktop-4090", ["gpu.count=2", f"{key}=0"])


@pytest.mark.parametrize("settings", ["nvme.drives=2", {"nvme.drives": 2}])
def test_settings_are_a_list(settings: object) -> None:
    with pytest.raises(MachineError, match="give a list of texts"):
        load_machine("desktop-4090", settings)  # type: ignore[arg-type]


def test_a_peak_that_is_given_goes_before_a_rate_that_the_part_has() -> None:
    slower = load_machine("zero-offload-v100", ["gpu.peak_fp16=10 TFLOP/s"]).stream("gpu0.compute")
    assert slower.rates["matmul_fp16_flops"].at(1e12) == pytest.approx(6e12)


@pytest.mark.parametrize(
    ("machine", "part", "said"),
    [
        ("desktop-4090", "h100-sxm-80gb", "; no desktop has a socket for h100-sxm-80gb, a module of servers"),
        ("desktop-4090", "h100-pcie-80gb", ""),
        ("laptop", "rtx-4090", "; no laptop has a slot for rtx-4090, a card"),
        ("laptop", "h100-sxm-80gb", "; no laptop has a socket for h100-sxm-80gb, a module of servers"),
        ("laptop", None, ""),
        ("server-8xh100", None, ""),
    ],
)
def test_a_case_that_cannot_have_a_gpu_is_named(machine: str, part: str | None, said: str) -> None:
    basis = load_machine(machine, [f"gpu.part={part}"] if part else []).basis.said()
    assert said in basis
    assert ("; no " in basis) == bool(said)


def test_two_cards_of_a_desktop_share_the_lanes_of_one() -> None:
    one, two = load_machine("desktop-4090"), load_machine("desktop-4090", ["gpu.count=2"])
    assert "host_link.h2d" not in one.limits
    assert two.limits["host_link.h2d"] == one.stream("gpu0.h2d").rates["bytes"].points[0][1]
