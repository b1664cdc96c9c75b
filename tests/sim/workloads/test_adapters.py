"""Work of adapters, against sums made by hand."""

import pytest

from tests.configs import config_of
from tierplan.sim.workloads.adapters import is_thin
from tierplan.sim.workloads.models import workload_of
from tierplan.sim.workloads.workload import Training, Unit


def test_products_beside_adapters_are_thin_where_a_side_is_no_longer_than_the_rank() -> None:
    assert is_thin("r=16", 4096, 16, 4096)
    assert is_thin("r=16,dropout=0.1", 16, 4096, 4096)
    assert not is_thin("r=16", 17, 4096, 4096)
    assert not is_thin("", 4096, 16, 4096)


@pytest.mark.parametrize("rank", [2, 6])
def test_products_of_adapters_take_what_they_move_beside_their_flops(rank: int) -> None:
    """Down to the rank and up again, then a kernel that scales and one that adds; backward of each product is two."""

    def block(lora: str, **more: str) -> Unit:
        training = Training(sequence_length=24, lora=lora, **more)  # type: ignore[arg-type]
        return workload_of("x", config, training).blocks[0]

    config = config_of("llama", 2)
    tokens, width = 24, int(str(config["hidden_size"]))
    one = block(f"r={rank},targets=k_proj", trained_dtype="bf16")
    both = block(f"r={rank},targets=k_proj+o_proj", trained_dtype="bf16")
    flops = 2 * tokens * width * 2 * rank
    down = tokens * width + rank * width + tokens * rank
    between = 2 * tokens * width + 3 * tokens * width
    assert both.forward["matmul_bf16_flops"] - one.forward["matmul_bf16_flops"] == flops
    assert both.forward["elementwise_bytes"] - one.forward["elementwise_bytes"] == 2 * (2 * down + between)
    assert both.num_elementwise - one.num_elementwise == 4
