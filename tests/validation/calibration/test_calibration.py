"""What calibration tells of a simulated machine whose rates, contention and dispatch latency are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean, median

import pytest

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels.machine import Machine, PredictionBasis, Rate, SharedLimit
from tierplan.hwmodels.scaling import with_ample_memory, with_rate_factors
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.sim.columns import unroll
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Span
from tierplan.sim.workloads.workload import Workload
from tierplan.validation.calibration.calibration import (
    Calibration,
    CalibrationError,
    calibrate,
    interval_half_width,
    scatter_half_width,
)
from tierplan.validation.calibration.dispatch import (
    measure_dispatch_latency,
    slowdown_between,
    slowed,
    steady_at,
)
from tierplan.validation.calibration.measurements import PlanMeasurement, middle_half, with_typical_stretch
from tierplan.validation.calibration.plans import calibration_plans
from tierplan.validation.calibration.rates import fit_drive_contention, fit_rates
from tierplan.validation.comparison.steps import Steps, cut_predicted


def changed(machine: Machine, factors: dict[str, float], pressure: float = 1.0) -> Machine:
    """The machine with other rates by stream; streams beside compute take `pressure` times as much of the cores."""
    streams = []
    for s in machine.streams:
        factor = factors.get(s.name, 1.0)
        rates = {
            kind: Rate(tuple((x, y * (factor if kind in ("bytes", "parameters") else 1.0)) for x, y in rate.points))
            for kind, rate in s.rates.items()
        }
        beside = pressure if s.name != "gpu0.compute" else 1.0
        takes = {
            limit: {k: w * (beside if limit == "cores" else 1.0) / (factor if k in ("bytes", "parameters") else 1.0)
                    for k, w in weights.items()}
            for limit, weights in s.takes.items()
        }  # fmt: skip
        streams.append(replace(s, rates=rates, takes=takes))
    return replace(machine, streams=tuple(streams))


def machine_with_cores() -> Machine:
    """Computation, updates and copies share two cores, in fractions of full speed."""
    machine = toy_machine()
    weights = {"gpu0.compute": 0.9, "host.adam": 0.9, "gpu0.h2d": 0.3, "gpu0.d2h": 0.3}
    streams = []
    for s in machine.streams:
        weight = weights.get(s.name, 0.0)
        by_kind = {kind: weight / max(y for _, y in rate.points) for kind, rate in s.rates.items()} | {"s": weight}
        streams.append(replace(s, takes={"cores": by_kind} if weight else {}))
    return replace(machine, streams=tuple(streams), shared_limits=(SharedLimit(name="cores", limit=1.0),))


def timed(workload: Workload, machine: Machine) -> Workload:
    """The workload with the seconds that its computations take on the machine."""

    def seconds(work: Mapping[str, float]) -> dict[str, float]:
        return {"s": machine.cost("gpu0.compute", work).alone_s}

    units = tuple(
        replace(
            u,
            forward=seconds(u.forward),
            backward=seconds(u.backward),
            saved=tuple(replace(t, recompute=seconds(t.recompute)) for t in u.saved),
        )
        for u in workload.units
    )
    return replace(workload, units=units)


def seconds_of(schedule: Schedule, steps: Steps) -> dict[str, float]:
    found = steps.ns_by_key()
    return {op.key: found[op.key] / 1e9 for op in schedule.ops}


@pytest.mark.parametrize("pressure", [0.8, 1.0, 1.3])
def test_calibration_finds_the_rates_and_the_contention_that_were_put_in(pressure: float) -> None:
    machine = machine_with_cores()
    workload = timed(toy_workload(4), machine)
    plan = uniform_plan(workload, UnitPlan(params="host", grads="host", states="nvme", acts="host"))
    schedule = lower(plan, workload, machine)
    factors = {"gpu0.h2d": 0.5, "nvme.read": 0.8, "host.adam": 1.5}
    measured = cut_predicted(simulate_on(unroll(schedule, 4), changed(machine, factors, pressure)))
    found = fit_rates(machine, [(schedule, seconds_of(schedule, measured))])
    for name in ("gpu0.h2d", "nvme.read", "host.adam"):
        kind = "parameters" if name == "host.adam" else "bytes"
        ratio = found.stream(name).rates[kind].at(1e6) / machine.stream(name).rates[kind].at(1e6)
        assert ratio == pytest.approx(factors[name], rel=0.15), name
    again = cut_predicted(simulate_on(unroll(schedule, 4), found))
    before = cut_predicted(simulate_on(unroll(schedule, 4), machine))
    assert again.step_s == pytest.approx(measured.step_s, rel=0.03)
    assert abs(before.step_s - measured.step_s) > 3 * abs(again.step_s - measured.step_s)


@pytest.mark.parametrize("pressure", [1.0, 1.8])
def test_calibration_finds_how_much_reads_slow_writes(pressure: float) -> None:
    """Of a drive that is described as having room for both, nearly."""
    machine, described = toy_machine(), 0.6
    workload = timed(toy_workload(4), machine)
    rates = {s.name: max(y for _, y in s.rates["bytes"].points) for s in machine.streams if "nvme" in s.name}

    def with_drive(weight: float) -> Machine:
        """Reads and writes take this part of it while they go at their full rate."""
        streams = [
            replace(s, takes={"drive": {"bytes": weight / rates[s.name]}}) if s.name in rates else s
            for s in machine.streams
        ]
        return replace(machine, streams=tuple(streams), shared_limits=(SharedLimit(name="drive", limit=1.0),))

    plans = [
        UnitPlan(params="host", grads="host", states="nvme"),
        UnitPlan(params="nvme", grads="nvme", states="nvme", acts="nvme"),
    ]
    schedules = [lower(uniform_plan(workload, plan), workload, machine) for plan in plans]
    truth = with_drive(pressure * described)
    measured = [cut_predicted(simulate_on(unroll(schedule, 4), truth)) for schedule in schedules]
    ops_s = [seconds_of(schedule, steps) for schedule, steps in zip(schedules, measured, strict=True)]
    pairs = list(zip(schedules, ops_s, strict=True))
    factor = fit_drive_contention(with_drive(described), pairs)
    assert factor == (1.0 if pressure == 1.0 else pytest.approx(pressure, rel=0.25))
    found = fit_rates(with_drive(described), pairs, drive_contention=factor)
    without = fit_rates(with_drive(described), pairs)
    for schedule, steps in zip(schedules, measured, strict=True):
        step_s = cut_predicted(simulate_on(unroll(schedule, 4), found)).step_s
        assert step_s == pytest.approx(steps.step_s, rel=0.03)
        off_s = abs(cut_predicted(simulate_on(unroll(schedule, 4), without)).step_s - steps.step_s)
        assert factor == 1.0 or off_s > 2 * abs(step_s - steps.step_s)


def test_a_drives_ops_that_took_ten_times_as_long_once_are_no_latency_of_it() -> None:
    machine = machine_with_cores()
    workload = timed(toy_workload(4), machine)
    plan = uniform_plan(workload, UnitPlan(params="nvme", grads="host", states="nvme", acts="recompute"))
    schedule = lower(plan, workload, machine)
    seconds = seconds_of(schedule, cut_predicted(simulate_on(unroll(schedule, 4), machine)))
    for op in [op for op in schedule.ops if op.stream == "nvme.read"][2::6]:
        seconds[op.key] *= 10
    found, before = (m.stream("nvme.read") for m in (fit_rates(machine, [(schedule, seconds)]), machine))
    assert found.rates["bytes"].at(1e6) == pytest.approx(before.rates["bytes"].at(1e6), rel=0.1)
    assert found.latency_s == pytest.approx(before.latency_s, abs=2e-4)


@pytest.mark.parametrize("latency_s", [0.0, 4e-3])
def test_calibration_tells_an_ops_latency_from_the_rate_of_its_stream(latency_s: float) -> None:
    """Short and long ops are both predicted; a factor alone would call the long ones slow for the short ones."""
    machine = machine_with_cores()
    workload = timed(toy_workload(4, tied=False), machine)
    plan = uniform_plan(workload, UnitPlan(params="nvme", grads="host", states="nvme", acts="recompute"))
    schedule = lower(plan, workload, machine)
    true = changed(machine, {"nvme.read": 0.8})
    slow = [replace(s, latency_s=latency_s) if s.name == "nvme.read" else s for s in true.streams]
    true = replace(true, streams=tuple(slow))
    measured = cut_predicted(simulate_on(unroll(schedule, 4), true)).ns_by_key()
    seconds = {op.key: measured[op.key] / 1e9 for op in schedule.ops}
    found = fit_rates(machine, [(schedule, seconds)])
    assert found.stream("nvme.read").latency_s == pytest.approx(latency_s, abs=2e-4)
    again = cut_predicted(simulate_on(unroll(schedule, 4), found)).ns_by_key()
    reads = [op for op in schedule.ops if op.stream == "nvme.read"]
    assert len({op.work["bytes"] for op in reads}) > 2
    for op in reads:
        assert again[op.key] / 1e9 == pytest.approx(seconds[op.key], rel=0.05), op.key


def test_dispatch_latency_is_read_off_a_trace_and_put_into_another() -> None:
    """Ops on one stream come one after the other; those that wait for another stream's op have the longer one."""
    machine = toy_machine()
    workload = toy_workload(4)
    schedule = lower(uniform_plan(workload, UnitPlan(acts="host")), workload, machine)
    streams = [replace(s, beside_s=2e-3, wake_s=3e-3) if s.name == "gpu0.compute" else s for s in machine.streams]
    plain = cut_predicted(simulate_on(unroll(schedule, 4), machine))
    slow = simulate_on(unroll(schedule, 4), replace(machine, streams=tuple(streams)))
    num_ops = sum(op.stream == "gpu0.compute" for op in schedule.ops)
    assert cut_predicted(slow).step_s >= plain.step_s + num_ops * 2e-3 * 0.99
    spans = [
        s._replace(granted_ns=s.start_ns, start_ns=s.start_ns + 2_000_000) if s.stream == "gpu0.compute" else s
        for s in slow.spans
    ]
    read_off = measure_dispatch_latency(cut_predicted(replace(slow, spans=tuple(spans))))
    assert read_off["gpu0.compute"][0] == pytest.approx(2e-3, rel=0.01)
    assert read_off["gpu0.h2d"][0] == pytest.approx(0.0, abs=1e-6)
    waits = cut_predicted(replace(slow, spans=tuple(s._replace(late_ns=1_500_000) for s in spans)))
    assert measure_dispatch_latency(waits)["gpu0.compute"][0] == pytest.approx(0.5e-3, rel=0.05), "the rest is a core's"
    assert waits.stretch["gpu0.compute"] > 1.0


def test_all_devices_were_as_slow_in_the_calibration_as_the_first() -> None:
    known, now = {"gpu0.compute": 2.0}, {"gpu0.compute": 1.0, "gpu1.compute": 1.0}
    longer = slowdown_between(1.0, known, now)
    assert longer["gpu1.compute"] == longer["gpu0.compute"] < 1


def test_a_slower_machine_stretches_all_but_drives() -> None:
    machine, workload = toy_machine(), toy_workload(4)
    schedule = lower(uniform_plan(workload, UnitPlan()), workload, machine)
    once = cut_predicted(simulate_on(unroll(schedule, 4), slowed(machine, 1.0)))
    twice = cut_predicted(simulate_on(unroll(schedule, 4), slowed(machine, 2.0)))
    assert once.step_s == cut_predicted(simulate_on(unroll(schedule, 4), machine)).step_s
    assert twice.step_s == pytest.approx(2 * once.step_s)


def measurements(true: Machine, believed: Machine, slowdown: float) -> dict[str, PlanMeasurement]:
    """All plans on the true machine, while it is `slowdown` times as slow as when its parts were timed."""
    ample = with_ample_memory(believed)
    workload = timed(toy_workload(3, tied=False), believed)
    found = {}
    for name, plan in calibration_plans(workload, ample).items():
        schedule = lower(plan, workload, ample)
        steps = cut_predicted(simulate_on(unroll(schedule, 4), slowed(true, slowdown)))
        found[name] = PlanMeasurement(
            schedule=schedule,
            turns_s=(steps.step_s, steps.step_s),
            op_s=seconds_of(schedule, steps),
            dispatch=measure_dispatch_latency(steps),
        )
    return found


def calibrated(believed: Machine, true: Machine, slowdown: float = 1.0) -> Calibration:
    modelled = toy_workload(3, tied=False)
    return calibrate(modelled, timed(modelled, believed), believed, measurements(true, believed, slowdown))


def test_a_plan_is_predicted_from_the_others() -> None:
    """The machine's rates are not what was believed, and it is a third slower than when its parts were timed."""
    believed = with_ample_memory(machine_with_cores())
    true = changed(believed, {"gpu0.h2d": 0.6, "nvme.read": 0.7, "host.adam": 0.8})
    calibration = calibrated(believed, true, 1.33)
    assert set(calibration.checks) == {"full-recompute", "partial-recompute", "offload", "on-nvme", "optimizer-sweep"}
    assert all(check == pytest.approx(1.0, abs=0.06) for check in calibration.checks.values()), calibration.checks
    deeper = toy_workload(8, tied=False)
    plan = uniform_plan(deeper, UnitPlan(params="host", grads="host", states="nvme", acts="recompute"))
    machine = calibration.on(believed)
    schedule = lower(plan, calibration.timed(deeper, believed), machine)
    wanted = cut_predicted(
        simulate_on(unroll(lower(plan, timed(deeper, believed), believed), 5), slowed(true, 1.1))
    ).step_s
    assert steady_at(schedule, machine, 1.1 / 1.33).period_s == pytest.approx(wanted, rel=0.05)


def test_latency_beside_busy_cores_is_not_counted_twice() -> None:
    """A machine whose description has it is fitted to the same steps as one without."""
    believed = with_ample_memory(machine_with_cores())
    streams = [replace(s, beside_s=5e-3) if s.name in ("gpu0.h2d", "nvme.read") else s for s in believed.streams]
    measured = measurements(changed(believed, {"nvme.read": 0.7}), believed, 1.0)
    modelled = toy_workload(3, tied=False)
    profiled = timed(modelled, believed)
    plain, loaded = (
        calibrate(modelled, profiled, machine, measured).on(machine)
        for machine in (believed, replace(believed, streams=tuple(streams)))
    )
    assert loaded.streams == plain.streams


def test_a_calibration_is_the_same_after_a_file(tmp_path: Path) -> None:
    believed = machine_with_cores()
    calibration = calibrated(believed, changed(believed, {"gpu0.h2d": 0.6}))
    calibration.save(tmp_path / "here.json")
    again = Calibration.load(tmp_path / "here.json")
    assert again.on(believed) == calibration.on(believed)
    deeper = toy_workload(8)
    assert again.timed(deeper, believed) == calibration.timed(deeper, believed)
    assert again.half_width == calibration.half_width
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(CalibrationError, match=r"other\.json is not a calibration as `tierplan calibrate` writes it"):
        Calibration.load(tmp_path / "other.json")


def test_intervals_are_as_wide_as_checks_were_off() -> None:
    wide = interval_half_width([1.1, 0.9, 1.1, 0.9])
    assert interval_half_width([]) < wide < 2.13 * 0.1 * 1.4826, "four checks alone, and what is usual"
    assert interval_half_width([1.1, 0.9] * 500) == pytest.approx(1.645 * 0.1 * 1.4826, rel=0.06), (
        "what is shown counts"
    )
    same = interval_half_width([1.1, 0.9, 1.1, 0.9, 1.1])
    assert interval_half_width([1.1, 0.9, 1.1, 0.9, 1.8]) == pytest.approx(same, rel=0.1), "it counts as any other"
    assert interval_half_width([1.0] * 40) > 0.025, "no handful of checks shows that nothing varies"
    low, high = PredictionBasis("", 0.1).interval_s(2.0)
    assert (low, high) == pytest.approx((2.0 * exp(-0.1), 2.0 * exp(0.1)))
    assert log(high / low) == pytest.approx(0.2)


@pytest.mark.parametrize(("num_turns", "share"), [(2, 0.925), (3, 0.885), (10, 0.895)])
def test_nine_in_ten_turns_lie_as_far_off_as_the_scatter_says(num_turns: int, share: float) -> None:
    """However few turns a plan had: what is known is their distance from their own median, not from the truth. Of two,
    those are half of their difference, above and below, so that a few more are held."""
    random, num_plans = Random(num_turns), 6
    held = []
    for _ in range(4000):
        turns = [[exp(random.gauss(0, 0.05)) for _ in range(num_turns)] for _ in range(num_plans)]
        slowdowns = [turn / median(plan) for plan in turns for turn in plan]
        next_turn = exp(random.gauss(0, 0.05)) / median([exp(random.gauss(0, 0.05)) for _ in range(num_turns)])
        held.append(abs(log(next_turn)) < scatter_half_width(slowdowns, num_plans))
    assert fmean(held) == pytest.approx(share, abs=0.015)
    assert scatter_half_width([1.0] * num_plans, num_plans) == 0.0, "one turn of each says nothing"


def test_one_turn_in_which_the_machine_paused_does_not_widen_intervals() -> None:
    turns = [0.97, 1.0, 1.02, 0.99, 1.0, 1.03] * 4
    assert scatter_half_width([*turns[1:], 1.9], 4) == pytest.approx(scatter_half_width(turns, 4), rel=0.15)


def test_a_head_that_was_timed_badly_is_no_fault_of_the_blocks() -> None:
    """Few steps of a profile time it half as long as it takes in training; a deeper model has no more heads."""
    believed = with_ample_memory(machine_with_cores())
    right = timed(modelled := toy_workload(3, tied=False), believed)
    head = right.units[-1]
    half = {kind: {"s": getattr(head, kind)["s"] / 2} for kind in ("forward", "backward")}
    profiled = replace(right, units=(*right.units[:-1], replace(head, **half)))
    measured = {}
    for name, m in measurements(believed, believed, 1.0).items():
        ops = [replace(op, work=half[op.kind]) if op.unit == head.name and op.kind in half else op
               for op in m.schedule.ops]  # fmt: skip
        measured[name] = replace(m, schedule=replace(m.schedule, ops=tuple(ops)))
    found = calibrate(modelled, profiled, believed, measured).timed(right, believed)
    for unit, wanted in zip(found.units, right.units, strict=True):
        assert unit.forward["s"] == pytest.approx(wanted.forward["s"], rel=0.02), unit.name
        assert unit.backward["s"] == pytest.approx(wanted.backward["s"], rel=0.02), unit.name


def test_times_of_other_units_are_carried_over_in_proportion() -> None:
    """What a description says half of takes twice as long, whatever the unit's size and however many tensors it saves;
    of units like the calibration model's, the seconds are the measured ones."""
    believed = machine_with_cores()
    modelled = toy_workload(3, tied=False)
    twice = {s.name: 0.5 for s in believed.streams if s.name == "gpu0.compute"}
    slow = replace(believed, streams=tuple(
        with_rate_factors(s, dict.fromkeys(s.rates, 0.5)) if s.name in twice else s for s in believed.streams
    ))  # fmt: skip
    calibration = calibrate(modelled, timed(modelled, slow), believed, measurements(believed, believed, 1.0))
    block, measured = calibration.timed(modelled, believed).blocks[1], timed(modelled, slow).blocks[1]
    assert block.forward["s"] == pytest.approx(measured.forward["s"], rel=1e-6)
    assert block.saved[2].recompute["s"] == pytest.approx(measured.saved[2].recompute["s"], rel=1e-6)
    other = toy_workload(5, slots=5)
    found, wanted = calibration.timed(other, believed), timed(other, slow)
    assert found.blocks[4].backward["s"] == pytest.approx(wanted.blocks[4].backward["s"], rel=0.05)
    assert found.blocks[4].saved[3].recompute["s"] == pytest.approx(wanted.blocks[4].saved[3].recompute["s"], rel=0.1)
    assert found.units[-1].saved_bytes == other.units[-1].saved_bytes


def test_the_middle_half_has_no_outliers() -> None:
    spans = {k: {"op": Span(f"s{k}/op", "gpu0.compute", 0, 0, 0, 1)} for k in range(12)}
    end_ns, now_ns = {}, 0
    for k in spans:
        now_ns += 1_810 if k % 4 == 0 else 1_000 + k
        end_ns[k] = now_ns
    windows_ns = {k: (end_ns.get(k - 1, 0), end_ns[k]) for k in spans}
    steps = Steps(spans=spans, windows_ns=windows_ns, steady=tuple(spans))
    assert middle_half(steps).steady == (5, 6, 7, 9, 10, 11)


def test_waits_for_a_core_are_told_from_work() -> None:
    """Beside another program every op lasts longer, in some turns more and in others less: what is fitted is the work,
    at the typical wait, and every plan is predicted for its own, with caches as cold as that makes them. A stream alone
    waits less than one of several."""
    machine, all_waits = with_ample_memory(machine_with_cores()), {False: (1.0, 1.2, 1.1), True: (1.6, 1.2, 1.7)}
    waits, means = {several: iter(those) for several, those in all_waits.items()}, {False: 1.1, True: 1.5}
    quiet, beside = measurements(machine, machine, 1.0), {}
    for name, m in quiet.items():
        wait, mean = next(waits[m.is_beside]), means[m.is_beside]
        streams = dict.fromkeys(m.schedule.streams, wait)
        longer = slowdown_between(1.0, dict.fromkeys(streams, mean), streams)
        slowdown = {stream: mean * times for stream, times in longer.items()}
        steps = cut_predicted(simulate_on(unroll(m.schedule, 4), slowed(machine, slowdown)))
        beside[name] = replace(m, turns_s=(steps.step_s,) * 2, stretch=streams)
    stretched, typical = with_typical_stretch(beside)
    assert [those["gpu0.compute"] for those in typical] == pytest.approx([1.1, 1.5])
    for name, m in stretched.items():
        mean = means[m.is_beside]
        assert m.op_s == pytest.approx({key: seconds * mean for key, seconds in quiet[name].op_s.items()})
    modelled = toy_workload(3, tied=False)
    calibration = calibrate(modelled, timed(modelled, machine), machine, beside)
    assert all(check == pytest.approx(1.0, abs=0.08) for check in calibration.checks.values()), calibration.checks


def test_blocks_that_save_different_tensors_have_plans_of_their_own() -> None:
    """With adapters the first block saves fewer than the others: what is before it is frozen."""
    workload, machine = toy_workload(), with_ample_memory(toy_machine())
    embed, first, *others = workload.units
    workload = replace(workload, units=(embed, replace(first, saved=first.saved[:-1]), *others))
    for plan in calibration_plans(workload, machine).values():
        lower(plan, workload, machine)
