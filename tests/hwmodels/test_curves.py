"""Curves of GPUs: what tables become, what a relative's are worth, and that answers name the basis."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_tables import PublicTable, curves_text, read_curves, table_list
from tierplan.cli import main
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.catalog import catalog_names, load_curves, load_part, part_values, shared_values
from tierplan.hwmodels.curves import SHAPES, continued, curve_errors, host_adam, kept_up, with_derived
from tierplan.hwmodels.description import KEYS, Quantity, parse_description
from tierplan.hwmodels.importers.reading import ImportedFileError
from tierplan.hwmodels.machine import MachineError, Rate


def table(path: str, kind: str, **more: str) -> PublicTable:
    return PublicTable(gpu="x", kind=kind, repository="o/r", commit="c0ffee", licence="MIT", path=path, **more)  # type: ignore[arg-type]


def test_leave_one_out_is_within_what_was_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "curves", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["median_own"] < 0.03
    assert record["median_by_relative"] < 0.10
    assert len(record["gpus"]) >= 12


def test_a_gpu_as_fast_as_its_relative_predicts_as_well_as_the_table() -> None:
    """A witness of the comparison: the same table under another name."""
    own, curve = load_part("gpu", "h100-sxm-80gb"), load_curves("h100-sxm-80gb")
    twin = {**own.values, "gpu.relative": Quantity("h100-sxm-80gb", "given", "test")}
    twins = {"h100-sxm-80gb": own, "twin": replace(own, values=twin)}
    error = next(curve_errors(twins, {"twin": curve, "h100-sxm-80gb": curve}))
    assert error.by_relative == pytest.approx(error.own)


def test_a_layer_table_becomes_blocks(tmp_path: Path) -> None:
    """100 TFLOP/s whatever the size: that is what the curve says, for one op forward and one backward."""
    shape, rows = SHAPES["llama-8b"], ["layer,tokens,time_us"]
    for tokens in (256, 2048):
        for name, (n, k) in zip(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), shape.products, strict=True):
            rows.append(f"{name},{tokens},{2 * tokens * n * k / 1e14 * 1e6}")
        rows.append(f"layernorm,{tokens},7")
    (tmp_path / "o" / "r").mkdir(parents=True)
    (tmp_path / "o" / "r" / "dense.csv").write_text("\n".join(rows))
    found = read_curves([table("dense.csv", "layers", model="llama-8b")], tmp_path)
    quantity = found.values["gpu.matmul_bf16"]
    assert isinstance(quantity.value, tuple)
    assert [rate for _, rate in quantity.value] == pytest.approx([1e14] * len(quantity.value))
    assert quantity.basis == "published"
    assert "MIT, https://github.com/o/r/blob/c0ffee/dense.csv" in quantity.source
    step_s = 3 * shape.layers * shape.flops(2048) / 1e14
    assert found.notes["steps"] == [["llama-8b", 1, 2048, pytest.approx(step_s, rel=1e-3), 0.0]]
    again = parse_description(curves_text(found), where="x.toml")
    assert again.values == found.values
    assert again.notes == found.notes


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "o" / "r").mkdir(parents=True)
    (tmp_path / "o" / "r" / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ImportedFileError, match="not a table of layers"):
        read_curves([table("x.csv", "layers", model="llama-8b")], tmp_path)
    with pytest.raises(ImportedFileError, match="clone o/r there"):
        read_curves([table("y.csv", "layers", model="llama-8b")], tmp_path)


def test_every_curve_is_of_a_part_and_of_a_listed_table() -> None:
    assert set(catalog_names("curves")) == {t.gpu for t in table_list()} <= set(catalog_names("gpus"))


def test_a_relative_is_scaled_by_peak_bandwidth_and_watts() -> None:
    def values(peak: float, watts: float, bandwidth: float) -> dict[str, Quantity]:
        numbers = {"gpu.peak_bf16": peak, "gpu.power": watts, "gpu.memory_bandwidth": bandwidth}
        return {name: Quantity(number, "nameplate", "sheet") for name, number in numbers.items()}

    measured = {
        "gpu.matmul_bf16": Quantity(((1e9, 1e13), (1e12, 8e13)), "published", "table"),
        "gpu.elementwise": Quantity(9e11, "published", "table"),
    }
    relative = {**values(1e14, 300.0, 1e12), **measured}
    twice = with_derived(values(2e14, 600.0, 5e11), relative, "r")
    assert twice["gpu.matmul_bf16"].value == ((2e9, 2e13), (2e12, 1.6e14))
    assert twice["gpu.elementwise"].value == 4.5e11
    assert {q.basis for n, q in twice.items() if n in measured} == {"derived"}
    starved = with_derived(values(2e14, 75.0, 5e11), relative, "r")["gpu.matmul_bf16"].value
    assert isinstance(starved, tuple)
    assert starved[1][1] == pytest.approx(1.6e14 / 2), "an eighth of the watts per peak: half the clock"


def test_a_card_of_72_watts_is_not_quicker_than_one_of_350() -> None:
    def at(part: str) -> float:
        value = part_values("gpu", part)["gpu.matmul_bf16"].value
        assert isinstance(value, tuple)
        return Rate(value).at(1e12)

    assert at("l4") < at("rtx-3090") < at("rtx-4090") < at("l40s") < at("h100-sxm-80gb") < at("b200-sxm-180gb")


def test_what_is_kept_up_limits_16_bit_products_of_much_work() -> None:
    curve = Quantity(((1e9, 1e13), (1e11, 6e13), (1e12, 8e13), (1e13, 7e13)), "published", "table")
    kinds = ("matmul_bf16", "attention_fp16", "matmul_fp32", "elementwise")
    table = {f"gpu.{kind}": curve for kind in kinds} | {"gpu.attention_bf16": Quantity(9e13, "published", "one rate")}
    assert kept_up(table) == table
    whole = kept_up({**table, "gpu.sustained_frac": Quantity(1.0)})
    assert all(whole[name].value == quantity.value for name, quantity in table.items())
    half = kept_up({**table, "gpu.sustained_frac": Quantity(0.5, "assumed")})
    assert half["gpu.matmul_bf16"].value == ((1e9, 1e13), (1e11, 4e13), (1e12, 4e13), (1e13, 4e13))
    assert half["gpu.attention_fp16"] == half["gpu.matmul_bf16"]
    assert half["gpu.matmul_bf16"].basis == "assumed", "the weaker of both"
    assert all(half[name] == table[name] for name in ("gpu.matmul_fp32", "gpu.elementwise", "gpu.attention_bf16"))


@pytest.mark.parametrize("part", catalog_names("curves"))
def test_a_table_is_as_it_was_measured_but_for_the_two_that_are_short_of_power(part: str) -> None:
    table, found = load_curves(part).values, part_values("gpu", part)
    changed = {name for name, quantity in table.items() if found[name] != quantity and name not in shared_values(part)}
    is_short = part in ("h100-sxm-80gb", "h200-sxm-141gb")
    ends_early = {"gpu.attention_bf16"} if part == "rtx-4090" else set()
    assert changed == ({"gpu.matmul_bf16", "gpu.attention_bf16"} if is_short else ends_early)


def test_a_relative_of_one_short_of_power_is_slowed_once_by_its_own_watts() -> None:
    """The PCIe card against what the module keeps up, as the law has it between two chips that are short of power."""
    sheet = {name: load_part("gpu", name).values for name in ("h100-pcie-80gb", "h100-sxm-80gb")}
    peak, watts = (
        sheet["h100-pcie-80gb"][key].points[0][1] / sheet["h100-sxm-80gb"][key].points[0][1]
        for key in ("gpu.peak_bf16", "gpu.power")
    )
    card, module = (part_values("gpu", name)["gpu.matmul_bf16"].points[-1][1] for name in sheet)
    assert card == pytest.approx(module * peak * (watts / peak) ** (1 / 3))


def test_what_is_kept_up_may_be_set_and_leaves_what_the_machine_says_itself() -> None:
    def fastest(*settings: str) -> float:
        rates = load_machine("server-8xh100", settings).stream("gpu0.compute").rates
        return max(rate for _, rate in rates["matmul_bf16_flops"].points)

    assert fastest("gpu.sustained_frac=1") == pytest.approx(792e12)
    assert fastest("gpu.sustained_frac=0.5") == pytest.approx(396e12)
    assert fastest() == pytest.approx(0.77 * 792e12)
    assert fastest("gpu.matmul_bf16=750 TFLOP/s", "gpu.sustained_frac=0.5") == 750e12
    assert fastest("gpu.part=a100-sxm-80gb") == pytest.approx(253e12)
    for order in (1, -1):
        assert fastest(*("gpu.sustained_frac=0.5", "gpu.part=a100-sxm-80gb")[::order]) == pytest.approx(126.5e12)


def test_what_a_machine_says_itself_goes_before_its_parts_curves() -> None:
    """Fuyou's machine was fitted, SSDTrain's has its clock locked: tables of their cards change neither."""
    fuyou, locked = load_machine("fuyou-4090"), load_machine("ssdtrain-a100")
    rates = fuyou.stream("gpu0.compute").rates
    assert rates["matmul_bf16_flops"] == Rate.constant(130e12)
    assert rates["attention_fp16_flops"] == Rate.constant(0.7 * 130e12)
    assert locked.stream("gpu0.compute").rates["matmul_fp16_flops"] == Rate.constant(0.6 * 169e12)


def test_answers_name_the_weakest_basis_and_which_rate_drives_write_at() -> None:
    text = load_machine("desktop-4090").basis.said()
    assert "gpu nameplate" in text, "elementwise rests on the sheet's bandwidth"
    assert "link assumed" in text
    assert "within their cache: set nvme.write" in text
    assert load_machine("desktop-4090", ["nvme.cached_write=5 GB/s"]).basis.said() == text, "no rate is another"
    steady = load_machine("desktop-4090", ["nvme.part=nm790"]).basis.said()
    assert "drives write as beyond their cache of 280 GB each" in steady
    assert "take turns" in steady
    drained = load_machine("desktop-4090", ["nvme.part=sn850x-4tb"]).basis.said()
    assert "cache of 450 GB each, which drains at 0.6 GB/s" in drained
    assert "cache" not in load_machine("fuyou-4090").basis.said()
    assert "take turns" not in load_machine("desktop-4090", ["nvme.mixed=1.2"]).basis.said()
    no_drives = load_machine("desktop-4090").basis.said({"gpu", "link"})
    assert no_drives.endswith(" (weakest: gpu nameplate, link assumed)")


@pytest.mark.parametrize(
    ("cores", "sockets", "bandwidth", "traffic", "measured"),
    [
        (2, 1, 1e12, 30, 2.14e9),
        *((32, 1, 204.8e9, 36, 1e9 * rate) for rate in (32 * 4.1943 / 31.7812, 4.1943 / 0.9577, 32 * 1.0486 / 8.0193)),
        *((48, 2, 256e9, 30, rate) for rate in (1e9 / 0.24, 4e9 / 1.03)),
    ],
)
def test_the_hosts_optimizer_is_bound_by_cores_or_by_dram(
    cores: int, sockets: int, bandwidth: float, traffic: int, measured: float
) -> None:
    """None of these rows was fitted (one thread, Adagrad and ZeRO-Offload's row of 10 G parameters were).

    Two threads of this project's machine; PyTorch's fused Adam with amsgrad on 32 cores of Ice Lake (zhuhaozhe/Misc,
    bench-fused-optimizer/bench-result.md at 5a2cf20); ZeRO-Offload's table for 1 and 4 G parameters.
    """
    values = {"host.cores": Quantity(float(cores)), "host.memory_bandwidth": Quantity(bandwidth)}
    found = host_adam(values, traffic, sockets)
    assert found is not None
    assert found.value == pytest.approx(measured, rel=0.15)


def test_a_machine_without_a_rate_of_adam_has_that_of_its_cores(tmp_path: Path) -> None:
    text = """[gpu]\npart = "rtx-4090"\n[link]\nh2d = "25 GB/s"\nd2h = "25 GB/s"\n[nvme]\ndrives = 0
[host]\ncapacity = "64 GB"\ncores = 2\nmemory_bandwidth = "70 GB/s"\n"""
    (tmp_path / "mine.toml").write_text(text)
    machine = load_machine(str(tmp_path / "mine.toml"))
    assert machine.stream("host.adam").rates["parameters"].at(1e9) == pytest.approx(0.745 * 70e9 / 30)
    assert "host derived" in machine.basis.said()


def test_attention_of_longer_sequences_than_a_table_has_goes_on_as_the_relatives() -> None:
    def values(*points: tuple[float, float]) -> dict[str, Quantity]:
        return {"gpu.attention_bf16": Quantity(points, "published", "test")}

    relative, own = values((1e10, 1e14), (4e10, 1.5e14), (4e12, 3e14)), values((1e9, 4e13), (4e10, 1e14))
    curve = Rate(continued(own, relative, "r")["gpu.attention_bf16"].points)
    assert [curve.at(amount) for amount in (1e9, 4e10, 4e12, 1e13)] == pytest.approx([4e13, 1e14, 2e14, 2e14])
    assert continued(relative, own, "r") == relative
    longer = load_machine("desktop-4090").stream("gpu0.compute").rates["attention_bf16_flops"]
    assert longer.at(1e13) > 1.2 * longer.at(1.2e11)


@pytest.mark.parametrize("name", [name for name in KEYS if KEYS[name].unless])
def test_what_a_file_says_more_directly_is_not_set_in_vain(name: str) -> None:
    """More cores never make a machine slower that way, either: what is derived may be less than what the file has."""
    with pytest.raises(MachineError, match=f"{name} in --set changes nothing: .* has host.adam"):
        load_machine("desktop-4090", [f"{name}=2"])
    both = load_machine("desktop-4090", [f"{name}=2", "host.adam=3 G/s"])
    assert both.stream("host.adam").rates["parameters"].at(1e9) == 3e9
