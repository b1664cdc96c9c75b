"""Steps that others measured, as `explain-run` reads them: DeepSpeed's logs, and traces of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest

from tierplan.cli import main
from tierplan.studies.slow_step.measured import MeasuredStepError, micro_batches_of, read_kineto, read_log


def event(cat: str, name: str, ts: float, dur: float, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def trace_of(events: list[dict[str, object]], folder: Path) -> str:
    with gzip.open(path := folder / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    return str(path)


def logged(num: int, steps: int, *, whole: bool = True, cut: int = 0, ranks: tuple[str, ...] = ("[Rank 0] ",)) -> str:
    """What DeepSpeed writes of steps of so many micro-batches: a line after each, and one after each step."""
    lines = []
    for step in range(steps):
        for k in range(num):
            times = f"fwd_microstep: 60.12 | bwd_microstep: 120.5 | step_microstep: {900 if k == num - 1 else 0.03}"
            lines += [times] * (step > 0 or k >= cut)
        lines += [
            f"fwd: {60.12 * num:.2f} | bwd: {120.5 * num:.2f} | bwd_inner: 1.0 | step: {900 + 0.03 * (num - 1)}"
        ] * whole
    return "\n".join(f"{rank}time (ms) | {line}" for line in lines for rank in ranks)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("num", "cut"), [(1, 0), (2, 0), (4, 0), (4, 2)])
def test_a_log_says_how_many_micro_batches_a_step_has(num: int, cut: int, whole: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for ranks in (("",), ("[Rank 0] ",), ("rank=0 ", "rank=1 ")):
        log.write_text(logged(num, 5, whole=whole, cut=cut, ranks=ranks))
        assert micro_batches_of(str(log)) == num
        found = read_log(str(log), num)
        assert found.step_s == pytest.approx(0.18062 * num + 0.9, rel=1e-3)
        assert found.phases is not None
        assert found.phases.update_s == pytest.approx(0.9, rel=1e-3)
        with pytest.raises(MeasuredStepError, match=rf"has {num} micro-batch.* in a step, but .* has {num + 1}"):
            read_log(str(log), num + 1)


@pytest.mark.parametrize(
    "text",
    [
        logged(4, 5, ranks=("", "")),  # two processes, or one log in two places
        logged(4, 1, cut=2),
        logged(4, 1, whole=False),
        "time (ms) | fwd: 5 | bwd: 20 | step: 1\n" * 3,
        "loss 3.2",
    ],
)
def test_a_log_that_does_not_say_it_leaves_it_open(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    assert micro_batches_of(str(tmp_path / "log")) is None


def test_micro_batches_that_update_nothing_are_no_steps(tmp_path: Path) -> None:
    """Their median said that an update takes 0.03 ms."""
    (tmp_path / "log").write_text(logged(4, 1, whole=False))
    with pytest.raises(MeasuredStepError, match=r"micro-batches that update nothing.*--accumulation"):
        read_log(str(tmp_path / "log"), 1)
    assert read_log(str(tmp_path / "log"), 4).step_s == pytest.approx(1.6226, rel=1e-3)


AUTO = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"}


@pytest.mark.parametrize(
    ("content", "argv", "message"),
    [
        (AUTO, [], ""),
        ({"output_dir": "x", "deepspeed": AUTO}, [], ""),
        ({"output_dir": "x", "deepspeed": AUTO, "gradient_accumulation_steps": 4}, [], ""),
        (AUTO, ["--accumulation", "4"], ""),
        (None, [], ""),
        ({**AUTO, "gradient_accumulation_steps": 2}, [], "in a step of log is 4, but c.json says 2"),
        (AUTO, ["--accumulation", "2"], "log has 4 micro-batches in a step, but "),
        (None, ["--accumulation", "2"], "log has 4 micro-batches in a step, but "),
    ],
)
def test_the_accumulation_is_that_of_the_log_where_nothing_else_says_it(
    content: object,
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tierplan.studies.slow_step.explain._best", lambda *_: None)
    Path("log").write_text(logged(4, 3))
    Path("c.json").write_text(json.dumps(content))
    config = [] if content is None else ["--config", "c.json"]
    asked = ["explain-run", "--model", "gpt2", "--machine", "desktop-4090", "--log", "log", *config, *argv, "--json"]
    assert main(asked) == (1 if message else 0)
    told = capsys.readouterr()
    assert message in told.err
    if not message:
        record = json.loads(told.out)
        assert record["setup"]["training"]["gradient_accumulation_steps"] == 4
        noted = " ".join(record["notes"])
        assert "--accumulation 1" not in noted
        assert ("the log shows 4 micro-batches in a step" in noted) == ("--accumulation" not in argv)


def test_micro_batches_of_a_log_are_summed_and_the_first_step_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [f"[Rank 0] time (ms) | fwd_microstep: {f} | bwd_microstep: 20 | step_microstep: {s}"
             for f, s in ((500, 0), (500, 900), (10, 0), (12, 30), (10, 0), (12, 30))]  # fmt: skip
    log.write_text("\n".join(lines))
    found = read_log(str(log), 2)
    assert found.step_s == pytest.approx(0.092)
    assert found.phases is not None
    assert found.phases.forward_s == pytest.approx(0.022)
    log.write_text("loss 3.2\n")
    with pytest.raises(MeasuredStepError, match="wall_clock_breakdown"):
        read_log(str(log), 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time (ms) | fwd_microstep: 5 | bwd_microstep: 20 | step_microstep: 1", "1 of the 2 micro-batches of a step"),
        ("time (ms) | fwd: 0.00 | bwd: 0.00 | step: 0.00", "steps of 0 ms"),
    ],
)
def test_a_log_without_one_step_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(MeasuredStepError, match=message):
        read_log(str(tmp_path / "log"), 2)


def test_a_trace_is_read_with_overlaps_counted_once(tmp_path: Path) -> None:
    events = [event("user_annotation", f"ProfilerStep#{k}", k * 1e6, 1e6) for k in range(2)]
    events += [
        event("kernel", "gemm", 1e5, 2e5),
        event("kernel", "norm", 2e5, 2e5),
        event("kernel", "ncclReduce", 0, 9e5),
    ]
    events += [event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1e6, 4e5, bytes=300),
               event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1e6, 1e5, bytes=100),
               event("user_annotation", "Optimizer.step#AdamW.step", 1.5e6, 5e5)]  # fmt: skip
    found = read_kineto(trace_of(events, tmp_path))
    assert found.step_s == pytest.approx(1.0)
    assert found.busy_s == pytest.approx({"compute": 0.15, "p2p": 0.45, "d2h": 0.2, "h2d": 0.05, "update": 0.25})
    assert found.pageable_frac == 0.75


def test_a_step_is_not_shorter_than_its_parts(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("rank 0 time (ms) | fwd: 200.0 | bwd: 400.0 | step: 50.0")
    assert read_log(str(tmp_path / "log"), 1, step_s=0.7).step_s == 0.7
    with pytest.raises(MeasuredStepError, match="take 650 ms, but --step-s is 500 ms"):
        read_log(str(tmp_path / "log"), 1, step_s=0.5)


NO_TIMES = [
    [{"ph": "X", "dur": dur, "ts": ts}] for dur, ts in (("long", 0), (float("nan"), 0), (1, float("inf")), (-1, 0))
]


@pytest.mark.parametrize("events", [[1], [{"ph": "X", "dur": 1}], *NO_TIMES, None])
def test_what_is_no_trace_is_refused(events: object, tmp_path: Path) -> None:
    for content in (events, {"traceEvents": events}):
        (tmp_path / "x.json").write_text(json.dumps(content))
        with pytest.raises(MeasuredStepError, match="no trace"):
            read_kineto(str(tmp_path / "x.json"))


def test_a_trace_without_marks_is_of_one_step_or_refused(tmp_path: Path) -> None:
    """Seconds of four steps were booked to one. The host's part of a step counts, too: Adam, after the last copy."""

    def steps(num: int, *, marks: bool = False) -> list[dict[str, object]]:
        return [
            made
            for at in (1e9 + 4e5 * k for k in range(num))
            for made in (
                *([event("user_annotation", f"ProfilerStep#{at}", at, 4e5)] if marks else []),
                event("kernel", "gemm", at, 1e5),
                event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 1e5, 2e4, bytes=300),
                event("cpu_op", "Optimizer.step#CPUAdam.step", at + 1.2e5, 2.7e5),
            )
        ]

    one = read_kineto(trace_of(steps(1), tmp_path), 0.4)
    assert one.busy_s["compute"] == pytest.approx(0.1)
    marked = read_kineto(trace_of(steps(4, marks=True), tmp_path))
    assert marked.busy_s["compute"] == pytest.approx(0.1)
    for num, times in ((2, "2.0"), (4, "4.0")):
        with pytest.raises(
            MeasuredStepError, match=rf"marks no steps and .* {times} times --step-s.*profiler\.step\(\)"
        ):
            read_kineto(trace_of(steps(num), tmp_path), 0.4)


@pytest.mark.parametrize(("step_s", "fine"), [(0.3, True), (0.25, True), (0.4, True), (1.2, False), (0.1, False)])
def test_marks_that_contradict_the_step_are_refused(step_s: float, fine: bool, tmp_path: Path) -> None:
    """Marks after each micro-batch booked the seconds of one to the whole step."""
    events = [event("user_annotation", f"ProfilerStep#{k}", k * 3e5, 3e5) for k in range(4)]
    path = trace_of([*events, event("kernel", "gemm", 4e5, 1e5)], tmp_path)
    if fine:
        assert read_kineto(path, step_s).step_s == step_s
        return
    with pytest.raises(MeasuredStepError, match=r"marks steps of 300 ms, but --step-s is .*after each optimizer step"):
        read_kineto(path, step_s)


def test_steps_between_two_cycles_of_the_profiler_are_not_counted(tmp_path: Path) -> None:
    """With acc_events a trace has several cycles, and nothing of the steps between them."""
    begins = [0, 1, 2, 9, 10]
    steps = [event("user_annotation", f"ProfilerStep#{k}", k * 1e6, 1e6) for k in begins]
    found = read_kineto(trace_of([*steps, *(event("kernel", "gemm", k * 1e6, 4e5) for k in begins)], tmp_path))
    assert (found.step_s, found.busy_s) == (pytest.approx(1.0), {"compute": pytest.approx(0.4)})


def test_a_trace_of_several_processes_is_refused(tmp_path: Path) -> None:
    """Their steps began a little apart, and were counted as so many."""
    steps = [event("user_annotation", f"ProfilerStep#{k}", k * 1e6, 1e6) for k in range(3)]
    both = [{**e, "ts": float(str(e["ts"])) + rank, "pid": rank} for e in steps for rank in (0, 1)]
    with pytest.raises(MeasuredStepError, match="marks steps of several processes; give the trace of one"):
        read_kineto(trace_of([*both, event("kernel", "gemm", 0, 9e5)], tmp_path))


def test_a_damaged_trace_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    events = [event("user_annotation", "ProfilerStep#1", 0, 1e6), event("kernel", "gemm", 0, 1e5)]
    path = Path(trace_of(events * 50, tmp_path))
    found, whole = read_kineto(str(path)), path.read_bytes()
    for k in range(len(whole)):
        path.write_bytes(whole[:k] + bytes([whole[k] ^ 0xFF]) + whole[k + 1 :])
        with suppress(MeasuredStepError):
            assert read_kineto(str(path)) == found


@pytest.mark.parametrize(("args", "pageable_frac"), [({"bytes": None}, 0.0), (None, 0.0), ({"bytes": 3}, 1.0)])
def test_a_copy_may_say_nothing_of_its_size(args: object, pageable_frac: float, tmp_path: Path) -> None:
    copy = {**event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 0, 4e5), "args": args}
    found = read_kineto(trace_of([event("user_annotation", "ProfilerStep#1", 0, 1e6), copy], tmp_path))
    assert (found.busy_s["d2h"], found.pageable_frac) == (pytest.approx(0.4), pageable_frac)


@pytest.mark.parametrize("args", [[1], {"bytes": "many"}, {"bytes": [1]}])
def test_a_copy_of_no_size_is_refused(args: object, tmp_path: Path) -> None:
    copy = {**event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 0, 4e5), "args": args}
    with pytest.raises(MeasuredStepError, match="no trace"):
        read_kineto(trace_of([event("user_annotation", "ProfilerStep#1", 0, 1e6), copy], tmp_path))


def test_what_a_trace_has_beyond_the_setup_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of a setup that has none, collectives on one GPU, and time in which nothing runs were passed over."""
    events = [event("kernel", "gemm", 1e3 * k, 900.0) for k in range(100)]
    events.append(event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0.0, 5e4, bytes=1e9))
    events.append(event("kernel", "ncclDevKernel_AllReduce", 0.0, 2e4))
    asked = ["explain-run", "--model", "gpt2", "--machine", "desktop-4090", "--time-limit", "0.1"]
    asked += ["--trace", trace_of(events, tmp_path), "--policy"]
    told = {}
    for policy, step_s in (("in-memory", "0.1"), ("in-memory", "9"), ("zero-offload", "0.3")):
        assert main([*asked, policy, "--step-s", step_s]) == 0
        told[policy, step_s] = " ".join(capsys.readouterr().out.split())
    copies, collectives, idle = (
        "0.05 s of copies between",
        "0.02 s of collectives, or",
        " have no kernel, copy or update",
    )
    assert [text in told["in-memory", "0.1"] for text in (copies, collectives, idle)] == [True, True, False]
    assert [text in told["in-memory", "9"] for text in (copies, collectives, idle)] == [False, False, True]
    assert [text in told["zero-offload", "0.3"] for text in (copies, collectives, idle)] == [False, True, True]
    assert f"Note: {9 - 0.09 - 0.05 - 0.02:.3g} s of the step or more have no kernel" in told["in-memory", "9"]
