"""What an update on the host takes with each format of moments, in updates of fp32 states beside a master copy.

    python -m benchmarks.runtime.host_work [--turns 9]

One core and its own time; the two take turns, and the median of the ratios and its quartiles are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod

import torch

from benchmarks.records import arguments, in_turns, spread
from tierplan.runtime.optim.adam import OptimizerSettings, update_states
from tierplan.runtime.optim.states import layout_of
from tierplan.sim.workloads.optimizers import STATES

SHAPE = (1024, 4096)


def updates(spec: str, *, has_master: bool) -> Callable[[], float]:
    """Makes one update of a bf16 matrix at a time, and says what it took in seconds of its core."""
    layout = layout_of(spec, [SHAPE], "bf16", is_block=True, has_master=has_master)
    params, grads = (torch.randn(prod(SHAPE)).to(torch.bfloat16) for _ in range(2))
    views = list(layout.views(torch.zeros(layout.size_bytes(layout.whole), dtype=torch.uint8), layout.whole))
    settings, number = OptimizerSettings(name=spec), 0

    def update() -> float:
        nonlocal number
        number += 1
        begin = time.thread_time()
        update_states(params, grads, views, layout, settings, part=layout.whole, step=number, lr=settings.lr)
        return time.thread_time() - begin

    update()
    return update


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = updates("adamw", has_master=True)
    for states in [*STATES][1:]:
        other = updates(f"adamw:states={states}", has_master=False)
        found = spread([coded_s / plain_s for coded_s, plain_s in in_turns(other, plain, turns)])
        print("{:16} {:6.1f}   ({:.1f} to {:.1f})".format(states, found["ratio"], *found["quartiles"]))


if __name__ == "__main__":
    main()
