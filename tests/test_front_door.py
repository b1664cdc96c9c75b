"""The public names exist, and looking at them or at `--help` loads neither torch nor the solver."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tierplan as tp
from tests.toys import toy_machine, toy_workload
from tierplan.cli import main
from tierplan.commands import COMMANDS
from tierplan.hwmodels.values.arguments import ArgumentError
from tierplan.sim.schedule import ScheduleError


def test_every_public_name_resolves() -> None:
    pytest.importorskip("torch")
    for name in tp.__all__:
        assert getattr(tp, name) is not None


def test_functions_of_four_arguments_or_more_say_what_they_are() -> None:
    pytest.importorskip("torch")
    functions = [f for f in (getattr(tp, name) for name in tp.__all__) if inspect.isfunction(f)]
    many = [f for f in functions if len(inspect.signature(f).parameters) >= 4]
    assert len(many) > 5
    for f in many:
        assert "Parameters\n----------\n" in (inspect.getdoc(f) or ""), f.__name__


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="load_machine"):
        tp.no_such_thing  # noqa: B018


def test_help_and_import_stay_light() -> None:
    code = (
        "import sys, tierplan, contextlib, io\n"
        "from tierplan.cli import main\n"
        "from tierplan.commands import COMMANDS\n"
        "for argv in [['--help'], *([name, '--help'] for name in COMMANDS)]:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main(argv)\n"
        "print(sorted({'torch', 'highspy', 'matplotlib', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    help_text = capsys.readouterr().out
    assert len(help_text.splitlines()) > 5
    assert "default ())" not in help_text


def test_wrong_usage_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["no-such-command"])
    assert stopped.value.code == 2
    assert "no-such-command" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["tierplan", "tierplan.cli"])
def test_the_module_is_the_command(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"tierplan {tp.__version__}"


def test_wrong_arguments_are_refused_by_name() -> None:
    """One mechanism for all public functions: what is swapped or of another type, and words that are not known."""
    pytest.importorskip("torch")
    workload, machine = toy_workload(2), toy_machine()
    plan: Any = partial(tp.plan, workload, machine)
    planned = plan(time_limit_s=1, policies=["in-memory"])
    trace = tp.simulate(planned.schedule, machine)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: tp.plan(machine, workload), "tierplan.plan: workload is <Machine toy: .*; it must be a Workload"),
        (lambda: plan(policies="fuyou"), "policies is 'fuyou'; it must be a list, each of which is text or None"),
        (lambda: plan(orders="vertical"), "orders is 'vertical'; it must be a list, each of which is one of horiz"),
        (lambda: plan(orders=["diag"]), r"orders is \['diag'\]; .* is one of horizontal, vertical or None"),
        (lambda: plan(orders=iter(["diag"])), "orders has 'diag'; choose of horizontal, vertical"),
        (lambda: plan(policies=["fuyuo"]), "no policy 'fuyuo'; did you mean 'fuyou'"),
        (lambda: plan(batches="some"), "batches is 'some'; it must be one of each, shared or None"),
        (lambda: plan(like="fuyou"), "like is 'fuyou'; it must be a UnitwisePlan or a PackPlan or a PagedPlan or None"),
        (lambda: plan(known=1), "known is 1; it must be a Known or None"),
        (lambda: plan(semantics="clip"), "semantics is 'clip'; it must be one of in-backward, exact-clip, delayed-1"),
        (lambda: plan(seed=True), "seed is True; it must be a whole number"),
        (lambda: tp.simulate(planned.prediction, machine), "schedule is <Pred.*a Schedule, such as its .schedule"),
        (lambda: tp.train(planned, None, [], steps=1), "schedule is <Plan.*a Schedule, such as its .schedule"),
        (lambda: tp.load_workload("gpt2", "bf16"), "tierplan.load_workload: training is 'bf16'; it must be a Train"),
        (lambda: tp.load_machine("laptop", "gpu.count=2"), "overrides is 'gpu.count=2'; it must be a list, each"),
        (lambda: tp.lower(workload, planned.plan, machine), "plan is <Workload .*; it must be a UnitwisePlan or"),
        (lambda: tp.compare(planned.schedule, trace, planned.steady), "measured is SteadyS.*Trace, such as its .trace"),
        (lambda: tp.vary(trace, machine), "schedule is <Trace .*; it must be a Schedule"),
        (lambda: tp.write_perfetto(trace, "x.json"), "traces is <Trace .*; it must be a mapping to a Trace"),
        (lambda: tp.plot_timeline(planned), "trace is <PlanResult .*; it must be a Trace"),
    ]  # fmt: skip
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    model = importlib.import_module("torch").nn.Linear(1, 1)
    with pytest.raises(ArgumentError, match=r"Trainer: learning_rate is 0.1; it must be a function or None"):
        tp.train(planned.schedule, model, [], steps=1, learning_rate=0.1)
    with pytest.raises(TypeError, match=r"plan\(\) missing 1 required positional argument: 'machine'"):
        tp.plan(workload)
    with pytest.raises(TypeError, match="unexpected keyword argument 'policy'"):
        tp.plan(workload, machine, policy="fuyou")


def test_arguments_of_many_kinds_are_taken(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    workload, machine = toy_workload(2), toy_machine()
    planned = tp.plan(workload, machine, time_limit_s=np.float32(1), seed=np.int64(0), policies=(n for n in ["fuyou"]))
    assert [*planned.policies] == ["fuyou"]
    assert tp.plan(workload, machine, time_limit_s=1, policies={"fuyou": 0}.keys(), orders=("vertical",)).step_s > 0
    tp.save_schedule(planned.schedule, tmp_path / "s.json")
    assert tp.load_schedule(tmp_path / "s.json") == planned.schedule
    assert tp.load_machine(Path("laptop"), ("host.capacity=64 GiB",)).name == tp.load_machine("laptop").name
    found = tp.vary(planned.schedule, machine, ops=np.float64(0.1), num_samples=2)
    assert tp.vary(planned.schedule, machine, ops={"gpu0.h2d": 1}, num_samples=2) != found
    assert tp.sensitivities(planned.steady.columns, machine, factor=2)


def test_annotations_of_public_functions_can_be_checked() -> None:
    """Each names what there is when it is called; a public function is found again by its public name."""
    pytest.importorskip("torch")
    for name in tp.__all__:
        if inspect.isfunction(function := getattr(tp, name)):
            assert (function.__module__, function.__qualname__) == ("tierplan", name)
            assert pickle.loads(pickle.dumps(function)) is function
            parameters = [*inspect.signature(function).parameters.values()]
            with pytest.raises(ArgumentError, match=f"tierplan.{name}: {parameters[0].name} is <object object .*; it"):
                function(
                    *[object()] * sum(p.default is p.empty and p.kind < 2 for p in parameters),
                    **{p.name: object() for p in parameters if p.default is p.empty and p.kind == p.KEYWORD_ONLY},
                )


def test_a_schedule_that_breaks_the_language_is_simulated_by_no_public_function() -> None:
    """An op that came before its input took what was not there yet, in silence."""
    toy = toy_machine()
    schedule = tp.lower(tp.plan(toy_workload(1), toy, time_limit_s=0.1).plan, toy_workload(1), toy)
    torn = replace(schedule, ops=schedule.ops[::-1])
    for function in (tp.simulate, tp.steady_state, tp.sensitivities):
        with pytest.raises(ScheduleError):
            function(torn, toy)
    with pytest.raises(ScheduleError):
        tp.unroll(torn, 2)
