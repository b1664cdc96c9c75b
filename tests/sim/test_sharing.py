"""Max-min fairness by its definition: feasible, and no speed can grow except at the cost of one no better off."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierplan.sim.sharing import max_min_speeds

LIMITS = ("A", "B", "C")
flows = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(LIMITS), st.floats(0.01, 10), max_size=3), st.sampled_from([0.5, 1.0, 3.0])
    ),
    min_size=1,
    max_size=7,
)
limits = st.fixed_dictionaries({name: st.floats(0.05, 10) for name in LIMITS})


@settings(max_examples=250, deadline=None)
@given(flows, limits)
def test_the_definition(flows: list[tuple[dict[str, float], float]], limits: dict[str, float]) -> None:
    demands, shares = [d for d, _ in flows], [s for _, s in flows]
    speeds = max_min_speeds(demands, shares, limits)
    load = {name: sum(v * d.get(name, 0.0) for v, d in zip(speeds, demands, strict=True)) for name in LIMITS}
    assert all(load[name] <= limits[name] * (1 + 1e-9) for name in LIMITS)
    assert all(0 < v <= 1 for v in speeds)
    for v, demand, share in zip(speeds, demands, shares, strict=True):
        if v == 1.0:
            continue
        # Some limit of this flow is full, and there nobody has, for their weight, more than this flow.
        assert any(
            load[name] >= limits[name] * (1 - 1e-9)
            and all(
                other / other_share <= v / share * (1 + 1e-9)
                for other, other_demand, other_share in zip(speeds, demands, shares, strict=True)
                if other_demand.get(name, 0.0) > 0
            )
            for name in demand
        )


def test_nothing_is_divided_among_nobody() -> None:
    assert max_min_speeds([], [], {}) == []


def test_a_limit_of_zero_stops_only_those_who_need_it() -> None:
    assert max_min_speeds([{"A": 1.0}, {"B": 1.0}, {"A": 0.0}], [1, 1, 1], {"A": 0.0, "B": 2.0}) == [0.0, 1.0, 1.0]


def test_the_order_of_flows_does_not_matter() -> None:
    demands = [{"A": 1.0, "B": 2.0}, {"A": 3.0}, {"B": 0.5}, {}]
    speeds = max_min_speeds(demands, [1.0] * 4, {"A": 2.0, "B": 1.0})
    turned = max_min_speeds(demands[::-1], [1.0] * 4, {"A": 2.0, "B": 1.0})
    assert speeds == pytest.approx(turned[::-1])
