"""The page of predictions made by commands: a row that was run several times counts once."""

from benchmarks.commands_campaign import page


def run_of(policy: str, measured_s: float, is_inside: bool = True) -> dict[str, object]:
    """One run of a row that was predicted to take a second."""
    error_frac = 1.0 / measured_s - 1.0
    return {
        "hour": "noon", "group": "gpt2", "policy": policy, "load": 1.0, "slowdown": 1.0, "interval_s": [0.9, 1.1],
        "step_s": {"predicted": 1.0, "measured": measured_s}, "step_error_frac": error_frac,
        "normalised_error_frac": error_frac / 2, "in_interval": is_inside,
    }  # fmt: skip


def test_a_row_of_several_runs_has_the_median_of_their_errors() -> None:
    runs = [run_of("fuyou", 1.25), run_of("in-memory", 0.5, False), run_of("fuyou", 2.0, False), run_of("fuyou", 1.0)]
    lines = page(runs).splitlines()
    figures = next(line for line in lines if line.startswith("| noon | 2 |"))
    # errors: fuyou -20 % (of 0, -20 and -50 %), in-memory +100 %
    assert [cell.strip() for cell in figures.split("|")[2:-1]] == [
        "2", "4", "4", "60.0 %", "100.0 %", "30.0 %", "50.0 %", "2 of 4",
    ]  # fmt: skip
    (fuyou,) = (line for line in lines if "| fuyou |" in line)
    assert "1 s, 1.25 s, 2 s" in fuyou
    assert "-20.0 %" in fuyou
    assert "-10.0 %" in fuyou


def test_a_row_without_an_answer_says_why() -> None:
    failed = {"hour": "noon", "group": "gpt2", "policy": "fuyou", "load": 1.0, "why_not": "no room"}
    assert "| noon | gpt2 | fuyou | no room |" in page([failed])
    assert "| noon | 1 | 2 | 1 |" in page([failed, run_of("fuyou", 1.0)])
