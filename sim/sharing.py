"""How flows divide shared limits: weighted max-min fairness under linear limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def max_min_speeds(
    demands: Sequence[Mapping[str, float]], shares: Sequence[float], limits: Mapping[str, float]
) -> list[float]:
    """Speeds in (0, 1], fractions of full speed, one per flow; no limit is exceeded and no speed can grow fairly.

    Flow i at speed s takes `s * demands[i][limit]` of each limit that it names. All speeds grow together, in proportion
    to `shares`, until a flow reaches full speed or a limit is full; those flows stop, the others go on. This is
    progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2), exact for linear limits. A limit of 0 that a
    flow needs gives it speed 0.
    """
    speeds = [0.0] * len(demands)
    left = {name: limits[name] for demand in demands for name, need in demand.items() if need > 0}
    growing = [i for i in range(len(demands)) if all(need <= 0 or left[name] > 0 for name, need in demands[i].items())]
    while growing:
        pull = {name: sum(demands[i].get(name, 0.0) * shares[i] for i in growing) for name in left}
        levels = [(1.0 - speeds[i]) / shares[i] for i in growing]
        level = min([*levels, *(left[name] / total for name, total in pull.items() if total > 0)])
        for i in growing:
            speeds[i] += level * shares[i]
        left = {name: left[name] - level * total for name, total in pull.items()}
        full = {name for name, unused in left.items() if unused <= 1e-12 * limits[name]}
        growing = [
            i
            for i in growing
            if speeds[i] < 1.0 - 1e-12 and not any(need > 0 and name in full for name, need in demands[i].items())
        ]
    return [1.0 if speed > 1.0 - 1e-12 else speed for speed in speeds]
