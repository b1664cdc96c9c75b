"""Long tests are thinned out here, so that the ordinary run is short; `make nightly` runs all of them."""

from __future__ import annotations

from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled`, few cases that show each value of each parameter; all others are nightly."""
    tests: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        values = {case: set(case.callspec.indices.items()) for case in cases}
        shown: set[tuple[str, int]] = set()
        while cases:
            case = max(cases, key=lambda case: len(values[case] - shown))
            if values[case] <= shown:
                break
            shown |= values[case]
            cases.remove(case)
        for case in cases:
            case.add_marker("nightly")
