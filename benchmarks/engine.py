"""What simulating costs, as ratios within one run, so that the numbers mean the same on any machine.

    python -m benchmarks.engine [--repeats 9] [--json FILE]

The step is that of GPT-3 175B, every saved tensor of its 96 blocks going its own way, on the described desktop with
large tiers: once with the shared limits of that machine, once without. CPU time counts, the best of the repeats, with
the compared things taking turns.

    events      SimPy events per op, counted, not timed
    simulate    against the same number of bare SimPy timeouts: pending together (a heap of them), or one after another
                in one process (the heap never holds more than one: the least that SimPy can cost)
    growth      cost per op of 10 steps against that of one
    ten steps   seconds for a trace of ten steps by SimPy, from the unrolled schedule
    compiled    the compiled engine against SimPy's, and what a search pays per plan: from the plan to columns in list
                order (templates at hand), from there to the steady step time, and both
    cold        what a process pays once to load compiled code that an earlier one has left: numba and all functions
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import simpy

from benchmarks.records import arguments, save
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_ample_memory
from tierplan.planner.lowering import Lowering
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.sim.analysis.completion import check_memory
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.columns import ScheduleColumns, unroll
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.compiled.rules import execute
from tierplan.sim.compiled.simulation import prices_on
from tierplan.sim.engine import simulate
from tierplan.sim.pricing import price
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Unit


def plan_of_gpt3(machine: Machine) -> tuple[Lowering, UnitwisePlan]:
    """About 5,000 ops: parameters and gradients in host memory, states on NVMe, saved tensors in turn."""
    workload = load_workload("gpt-175b", Training(per_device_train_batch_size=1, sequence_length=2048))

    def choice(unit: Unit) -> UnitPlan:
        acts = tuple(("host", "nvme")[k % 2] for k in range(len(unit.saved))) if unit.kind == "block" else "keep"
        return UnitPlan(params="host", grads="host", states="nvme", acts=acts)  # type: ignore[arg-type]

    units = tuple(map(choice, workload.units))
    return Lowering(workload, machine), UnitwisePlan(policy="benchmark", units=units)


def steady_of(columns: ScheduleColumns, machine: Machine) -> SteadyState:
    """What the search asks of a candidate."""
    check_memory(columns)
    return steady_state(columns, machine)


COLD = """
import time
import numpy as np
from tierplan.hwmodels.machine import Machine, Stream
from tierplan.sim.columns import columns_of
from tierplan.sim.schedule import Op, Schedule
machine = Machine(name="one", tiers=(), streams=(Stream(name="s", rates={}),))
schedule = Schedule(name="one", tiers=(), buffers=(), ops=(Op(key="a", stream="s", kind="x", work={"s": 1.0}),))
began = time.process_time()
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.compiled.readiness import ready_order
from tierplan.sim.compiled.rules import execute
from tierplan.sim.compiled.simulation import prices_on
columns = columns_of(schedule)
graph, prices = graph_columns(columns), prices_on(columns, machine)
execute(graph, prices)
ready_order(graph, prices.alone_s, np.zeros(len(graph.first_on_stream), np.bool_))
print(time.process_time() - began)
"""


def cold_s(repeats: int) -> float:
    """Seconds that a process pays to load compiled code: numba itself, and what an earlier process has compiled."""
    times = [
        float(subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, check=True).stdout)
        for _ in range(repeats + 1)
    ]
    return min(times[1:])


def timeouts_together(num: int) -> None:
    env = simpy.Environment()
    for k in range(num):
        env.timeout(k * 7919 % num)
    env.run()


def timeouts_in_turn(num: int) -> None:
    env = simpy.Environment()

    def process() -> Generator[simpy.Event, None, None]:
        for _ in range(num):
            yield env.timeout(1)

    env.process(process())
    env.run()


def events_of(run: Callable[[], object]) -> int:
    """How many events SimPy processes."""
    count, step = 0, simpy.Environment.step

    def counting(self: simpy.Environment) -> None:
        nonlocal count
        count += 1
        step(self)

    simpy.Environment.step = counting  # type: ignore[method-assign]
    try:
        run()
    finally:
        simpy.Environment.step = step  # type: ignore[method-assign]
    return count - 1  # the last call finds the queue empty


def best_s(things: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    best = dict.fromkeys(things, float("inf"))
    for _ in range(repeats):
        for name, run in things.items():
            begin_s = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - begin_s)
    return best


def measure(machine: Machine, repeats: int) -> dict[str, float]:
    lowering, plan = plan_of_gpt3(machine)
    columns = lowering.columns(plan)
    schedule = columns.schedule()
    costs, limits = price(schedule, machine), machine.limits
    graph, prices = graph_columns(columns), prices_on(columns, machine)
    num_ops = len(schedule.ops)
    ten = unroll(schedule, 10)
    ten_costs = price(ten, machine)
    found = best_s(
        {
            "timeouts together": lambda: timeouts_together(num_ops),
            "timeouts in turn": lambda: timeouts_in_turn(num_ops),
            "simulate": lambda: simulate(schedule, costs, limits=limits),
            "execute": lambda: execute(graph, prices),
            "lower": lambda: lowering.columns(plan),
            "steady": lambda: steady_of(columns, machine),
            "plan to steady": lambda: steady_of(lowering.columns(plan), machine),
            "simulate ten steps": lambda: simulate(ten, ten_costs, limits=limits),
        },
        repeats,
    )
    return {
        "ops": num_ops,
        "events_per_op": events_of(lambda: simulate(schedule, costs, limits=limits)) / num_ops,
        "simulate_us_per_op": found["simulate"] / num_ops * 1e6,
        "simulate_over_timeouts_together": found["simulate"] / found["timeouts together"],
        "simulate_over_timeouts_in_turn": found["simulate"] / found["timeouts in turn"],
        "ten_steps_over_one_per_op": found["simulate ten steps"] / 10 / found["simulate"],
        "ten_steps_s": found["simulate ten steps"],
        "simulate_over_compiled": found["simulate"] / found["execute"],
        "compiled_ns_per_op": found["execute"] / num_ops * 1e9,
        "plan_to_columns_ms": found["lower"] * 1e3,
        "columns_to_steady_ms": found["steady"] * 1e3,
        "plan_to_steady_ms": found["plan to steady"] * 1e3,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shared = with_ample_memory(load_machine("desktop-4090"))
    alone = replace(shared, shared_limits=(), streams=tuple(replace(s, takes={}) for s in shared.streams))
    results = {
        "without shared limits": measure(alone, args.repeats),
        f"with {len(shared.shared_limits)} shared limits": measure(shared, args.repeats),
    }
    results["a second process"] = {"loads_compiled_code_s": cold_s(args.repeats)}
    for name, numbers in results.items():
        print(name)
        for what, value in numbers.items():
            print(f"    {what:40} {value:10.3g}")
    save(args.json, results)


if __name__ == "__main__":
    main()
