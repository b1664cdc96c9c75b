"""Drive endurance: what a step writes, over its time, is at most what the drives may take; or the answer says why."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.planner.instances import MB, chain, small_machine
from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.cli import main
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.planner.infeasible import InfeasiblePlan, has_room
from tierplan.planner.lowering import lower
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.milp.capacities import ENDURANCE
from tierplan.planner.milp.model import build, fractions
from tierplan.planner.milp.program import Solver
from tierplan.planner.plan import UnitPlan
from tierplan.planner.planning import plan
from tierplan.planner.questions.endurance import SECONDS_PER_YEAR, allowed_bytes_per_s, lifetime_s, written_bytes
from tierplan.planner.several_devices.sharded import tensor_parallel
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.advise import largest_model_of
from tierplan.studies.evaluate import most_tokens_per_s
from tierplan.studies.study import Point


def rated(machine: Machine, bytes_per_s: float, years: float = 1.0, drives: int = 2) -> Machine:
    """The machine with drives that take this rate of writing for so many years."""
    each = bytes_per_s * years * SECONDS_PER_YEAR / drives
    return replace(machine, description={"nvme.endurance": {"value": each}, "nvme.drives": {"value": drives}})


def room_for_states_costs_time() -> tuple[Workload, Machine]:
    """Not all states fit into device and host memory: fewer of them on NVMe means more recomputation on the device."""
    workload = chain(
        forward_s=[1.0] * 8,
        parameters=[4 * MB] * 8,
        saved_mb=[[5, 5, 5, 5]] * 8,
        recompute_s=[[0.2] * 4] * 8,
        border_mb=1,
    )
    return workload, small_machine(device_mb=280, host_mb=300, link_mb_per_s=200)


def test_the_allowed_rate_is_what_all_drives_take_over_the_lifetime():
    machine = rated(small_machine(), 5e6, years=2.0)
    assert allowed_bytes_per_s(machine, 2.0) == pytest.approx(5e6)
    assert allowed_bytes_per_s(machine, 4.0) == pytest.approx(2.5e6)
    assert lifetime_s(machine, written=10_000_000, step_s=2.0) == pytest.approx(2 * SECONDS_PER_YEAR)


def test_what_a_step_writes_is_states_and_parameters_that_live_on_the_drive():
    """bf16 with a master copy: 12 and 2 bytes per parameter; what is read does not count."""
    workload = toy_workload(3, tied=False)
    choice = UnitPlan(params="nvme", grads="host", states="nvme")
    schedule = lower(uniform_plan(workload, choice), workload, toy_machine())
    assert written_bytes(schedule) == 14 * workload.num_parameters
    in_memory = lower(uniform_plan(workload, UnitPlan()), workload, toy_machine())
    assert written_bytes(in_memory) == 0


def test_without_drives_nothing_wears():
    assert allowed_bytes_per_s(small_machine(nvme_mb=0), 5.0) == float("inf")


def test_a_machine_that_does_not_say_is_asked():
    with pytest.raises(MachineError, match=r"nvme\.endurance"):
        allowed_bytes_per_s(small_machine(), 5.0)
    with pytest.raises(MachineError, match=r"rated for 0 bytes"):
        allowed_bytes_per_s(rated(small_machine(), 0.0), 5.0)


@pytest.mark.parametrize("years", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lifetime_is_a_finite_number_of_years(years: float):
    with pytest.raises(ValueError, match="above 0"):
        allowed_bytes_per_s(rated(small_machine(), 1e6), years)


def test_the_program_writes_no_more_than_it_may():
    workload, machine = room_for_states_costs_time()
    free = problem(workload, machine, semantics="in-backward")
    for limit_mb_per_s in (8.0, 4.0, 1.0, 0.1):
        p = problem(workload, machine, semantics="in-backward", write_limit_bytes_per_s=limit_mb_per_s * MB)
        model = build(p)
        found = Solver().solve(model.program)
        assert found.usable
        step_s = fractions(model, found).step_s
        (row,) = model.program.rows_of(ENDURANCE)
        columns = model.program.columns[model.program.starts[row] : model.program.starts[row + 1]]
        durations = {c for c, _ in model.cols.tau}
        written_mb = 1000 * sum(found.values[c] for c in columns if c not in durations)
        assert len(columns) > len(durations)
        assert written_mb <= limit_mb_per_s * step_s * (1 + 1e-6)
        assert lower_bound(p).step_s >= lower_bound(free).step_s * (1 - 1e-9)


def test_tighter_lifetimes_never_give_quicker_plans_and_are_kept():
    workload, machine = room_for_states_costs_time()
    free = plan(workload, machine, time_limit_s=3, policies=())
    rate = written_bytes(free.schedule) / free.step_s
    assert rate > 0, "the test needs a plan that writes"
    for frac in (2.0, 0.6, 0.2):
        found = plan(workload, rated(machine, frac * rate), time_limit_s=3, policies=(), drive_lifetime_years=1.0)
        assert written_bytes(found.schedule) / found.step_s <= frac * rate * (1 + 1e-9)
        assert found.step_s >= free.step_s * (1 - 1e-9)
        assert found.lower_bound_s <= found.step_s
        if frac > 1:
            assert found.step_s <= free.step_s * 1.02
    assert found.step_s > free.step_s, "so few writes are free: the test needs a plan that has to write"


def seconds(text: str) -> float:
    """As `format_s` writes them."""
    units = {"days": 86_400.0, "h": 3_600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}
    return sum(float(number.replace(",", "")) * units[unit] for number, unit in re.findall(r"([\d.,]+) (\w+)", text))


def test_states_that_must_be_written_too_fast_are_an_answer():
    workload = chain(forward_s=[0.1] * 10, parameters=[4 * MB] * 10, saved_mb=[[1]] * 10)
    machine = rated(small_machine(device_mb=100, host_mb=300), 1e5)
    with pytest.raises(InfeasiblePlan, match="spares the drives") as caught:
        plan(workload, machine, time_limit_s=3, policies=("zero-infinity",), drive_lifetime_years=1.0)
    said = " ".join(str(caught.value).split())
    own = re.search(r"in a step of (.*?), ([\d.,]+) times .* its step would have to take (.*?)\. By", said)
    bound = re.search(r"no plan that spares them has a step of less than (.*?);", said)
    assert own
    assert bound
    step_s, needed_s, bound_s = map(seconds, (own[1], own[3], bound[1]))
    assert needed_s == pytest.approx(step_s * float(own[2].replace(",", "")), rel=0.02)
    assert bound_s <= needed_s * 1.01
    assert "--accumulation" in said
    # in the fluid's account, at least the states that fit nowhere else are written in every step
    states_mb = 10 * 4 * 12
    least_s = lower_bound(problem(workload, machine, semantics="in-backward", write_limit_bytes_per_s=1e5)).step_s
    assert least_s >= (states_mb - 400) * MB / 1e5


def test_what_fits_is_counted_among_plans_that_spare_the_drives_alone():
    """It was said that all 64 sequences fit, of 64 that do not: they fit by writing, which was ruled out."""
    training = Training(per_device_train_batch_size=64, sequence_length=1024)
    workload, machine = load_workload("llama-3.1-8b", training), load_machine("desktop-4090")
    with pytest.raises(InfeasiblePlan) as caught:
        plan(workload, machine, drive_lifetime_years=1e9)
    said = str(caught.value)
    assert "and spares its drives as was asked" in said
    assert said.endswith("sequences per micro-batch that fit: none, not even one")
    assert has_room(workload, machine)
    assert not has_room(workload, machine, write_limit_bytes_per_s=allowed_bytes_per_s(machine, 1e9))


def test_a_bound_that_excludes_all_plans_is_not_called_a_step_of_endless_years():
    workload, machine = load_workload("llama-3.1-8b", Training()), load_machine("desktop-4090")
    with pytest.raises(InfeasiblePlan, match="no plan in such micro-batches spares them") as caught:
        plan(workload, machine, drive_lifetime_years=1e9)
    assert "inf" not in str(caught.value)


def test_bounds_and_larger_models_know_the_lifetime_too():
    """A model that no drive would outlive was said to be possible, and a bound to promise hundreds of tokens/s."""
    point = Point(model="llama-3.1-8b", machine="desktop-4090", batch=4)
    assert most_tokens_per_s(point) > 500
    assert most_tokens_per_s(replace(point, drive_lifetime_years=1e9)) == 0
    largest = largest_model_of(replace(point, drive_lifetime_years=1e9))
    assert largest["larger_model_may_fit"] is False


def test_the_command_takes_a_lifetime(tmp_path, capsys):
    config = {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 512, "vocab_size": 1000}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    arguments = ["plan", "--model", str(path), "--machine", "laptop", "--seq", "512", "--time-limit", "1", "--json"]
    assert main([*arguments, "--drive-lifetime-years", "5", "--set", "nvme.endurance=600 TB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["drive_lifetime_s"] is None or found["drive_lifetime_s"] >= 5 * SECONDS_PER_YEAR


def test_what_no_plan_of_several_devices_does_is_said_of_all_their_plans():
    """A bound of one device was told, whose memory is a fourth: what cuts operators writes much less."""
    settings = ["gpu.count=4", "host.capacity=24 GiB", "nvme.drives=1"]
    workload, machine = load_workload("llama-3.1-8b", Training()), load_machine("desktop-4090", settings)
    with pytest.raises(InfeasiblePlan, match="spares the drives") as caught:
        plan(workload, machine, time_limit_s=2, drive_lifetime_years=3.0)
    bound = re.search(r"no plan that spares them has a step of less than (.*?);", " ".join(str(caught.value).split()))
    assert bound
    limit = allowed_bytes_per_s(machine, 3.0)
    of_one = problem(workload, machine, semantics="in-backward", write_limit_bytes_per_s=limit)
    assert (
        seconds(bound[1])
        <= lower_bound(tensor_parallel(of_one, 4, waits=True)).step_s
        < 0.01 * lower_bound(of_one).step_s
    )
