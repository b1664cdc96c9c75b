"""The planner's loop against brute force on 200 random instances: how far from the best of all plans it ends.

    python -m benchmarks.planner_bruteforce [NUM] > brute_force.txt

Every fifth instance has drives (2,704 plans, some 15 s each); the others have 225 plans.
"""

from __future__ import annotations

import random
import sys

from tests.planner.instances import random_chain, random_machine
from tests.planner.test_against_bruteforce import best_of_all, without_drives
from tierplan.planner.solve import InfeasiblePlan, plan

WITHIN = 1.01


def main(num: int) -> int:
    worse: list[tuple[int, float]] = []
    num_feasible = 0
    for seed in range(num):
        rng = random.Random(seed)
        workload = random_chain(rng, 2, slots=1)
        machine = random_machine(rng, workload)
        if seed % 5:
            machine = without_drives(machine)
        best = best_of_all(workload, machine)
        try:
            found = plan(workload, machine, time_limit_s=20).step_s
        except InfeasiblePlan:
            found = None
        if best is not None:
            num_feasible += 1
            ratio = float("inf") if found is None else found / best
            if ratio > WITHIN:
                worse.append((seed, ratio))
                print(f"seed {seed}: {ratio:.4f} of the best", flush=True)
    print(f"{num} instances, {num_feasible} with a plan that fits; {len(worse)} more than 1 % above the best of all")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
