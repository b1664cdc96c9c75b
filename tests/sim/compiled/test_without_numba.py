"""Without numba everything works, slower, and says so. Each case is a process of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tierplan.sim.compiled import graph_columns, readiness, rules

ROOT = Path(__file__).parents[3]

CHECK = """
import sys, warnings
MISSING
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from tierplan.sim.compiled import compiler, rules
warnings.simplefilter("error")
print([str(w.message).split(";")[0] for w in caught if "numba" in str(w.message)], type(rules.execute).__name__)

from tests.sim.compiled.agreement import both_engines_agree
both_engines_agree(40)()
"""


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_where_it_is_not_installed() -> None:
    out = run(CHECK.replace("MISSING", "sys.modules['numba'] = None"))
    assert out == (
        "['numba is not installed: schedules are simulated by plain Python, with the same results, much slower'] "
        "function"
    )


def test_where_it_is_switched_off() -> None:
    assert run(CHECK.replace("MISSING", ""), NUMBA_DISABLE_JIT="1") == "[] function"


def test_where_machine_code_can_be_kept_nowhere() -> None:
    """A read-only installation for a user without a home: compiled anew in each process, which is said."""
    code = """
from numba.core import caching
caching.CacheImpl._locator_classes = []
import sys, io
sys.stderr = io.StringIO()
from tierplan.sim.compiled.rules import _set_up
import numpy as np
print(_set_up(np.zeros(1, np.int64), np.zeros(1, np.int64), 0, 3, 0), _set_up.nopython_signatures != [])
print(sys.stderr.getvalue())
"""
    compiled, said = run(code).splitlines()
    assert compiled == "1 True"
    assert said.startswith("compiling the simulator, each time, for some 20 seconds: ")
    assert said.endswith("; set NUMBA_CACHE_DIR to a folder that can")


COMPILED = [*sorted((ROOT / "sim" / "compiled").glob("*.py")), ROOT / "planner" / "lowering" / "placing.py"]


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.stem)
def test_compiled_functions_use_only_what_is_in_their_own_file(path: Path) -> None:
    """numba keeps machine code until the function's own file changes, and would miss a change in another one.

    Classes may come from elsewhere: they are part of the types for which machine code is kept.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and any(ast.unparse(d) == "compiled" for d in function.decorator_list):
            used = {x.id for line in function.body for x in ast.walk(line) if isinstance(x, ast.Name)}
            assert all(name[0].isupper() and not name.isupper() for name in used & imported)


def test_the_parser_sees_compiled_functions() -> None:
    """The test above would pass if it found none."""
    for module in (rules, readiness, graph_columns):
        assert "\n@compiled\ndef " in Path(module.__file__).read_text(encoding="utf-8")


def test_the_first_compilation_is_announced_once_and_no_search_pays_for_it(tmp_path: Path) -> None:
    """It takes seconds without a sign of life; with machine code kept, the next process has nothing to announce."""
    code = """
import sys, io, time
sys.stderr = io.StringIO()
from tierplan.sim.compiled.compiler import computing_s, is_kept, wall_s
from tierplan.sim.compiled.rules import _set_up
import numpy as np
was_kept = is_kept(_set_up)
for _ in range(2):
    _set_up(np.zeros(1, np.int64), np.zeros(1, np.int64), 0, 3, 0)
said = sys.stderr.getvalue().count("compiling the simulator, once")
print(was_kept, is_kept(_set_up), is_kept(len), said)
print(time.process_time() > computing_s(), time.perf_counter() > wall_s())
"""
    assert [run(code, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)] == [
        "False True True 1\nTrue True",
        "True True True 0\nFalse False",
    ]
