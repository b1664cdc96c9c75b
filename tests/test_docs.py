"""What the documentation shows is true: its examples run, its links lead somewhere, its keys exist.

In `docs/*.md`, README.md and CONTRIBUTING.md:

- ```python blocks run, in order, in one namespace per page, in an empty folder. What follows `>>>` is a doctest.
- ```console blocks: each line after `$ tierplan` is run as a command and must succeed.
- ```toml, ```json and ```text blocks are not run. A first line `# file: NAME` writes a toml or json block to that file.
- A block behind `<!-- not run: REASON -->` is not run.
"""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_imports import ROOMS, ROOT
from tierplan.cli import main

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FOLDERS = (*ROOMS, "tierplan", "tests", "docs", "notebooks", "benchmarks")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: [^>]{8,} -->\s*$")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if not NOT_RUN.search(text[: found.start()]):
            yield Block(found[1], found[2], text[: found.start()].count("\n") + 2)


def has_examples(page: Path) -> bool:
    return any(b.language in ("python", "console") for b in blocks(page))


@pytest.mark.parametrize("page", [p for p in PAGES if has_examples(p)], ids=lambda p: p.stem)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.language == "python":
            if ">>>" in block.text:
                test = doctest.DocTestParser().get_doctest(block.text, namespace, where, str(page), block.line)
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
                said: list[str] = []
                runner.run(test, out=said.append, clear_globs=False)
                namespace.update(test.globs)
                assert runner.failures == 0, "".join(said)
            else:
                exec(compile(block.text, where, "exec"), namespace)
        elif block.language == "console":
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.startswith("$ tierplan "):
                    words = shlex.split(line.removeprefix("$ tierplan "), comments=True)
                    try:
                        status = main(words)
                    except SystemExit as stop:
                        status = int(stop.code or 0)
                    assert status == 0, f"{where}: {line}"
        elif block.language in ("toml", "json"):
            first, _, rest = block.text.partition("\n")
            if name := re.fullmatch(r"# file: ([\w./-]+)", first):
                Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
                Path(name[1]).write_text(rest, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in backticks that look like files of this repository are there."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Pages, anchors and links between them, as `make docs` builds them (without `--quiet`, which hides warnings)."""
    pytest.importorskip("material", reason="the site needs mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^ +- .*?([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(p.name for p in PAGES if p.parent.name == "docs"), "each page once in the menu"


def test_every_page_is_reachable_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    listed = set(re.findall(r"\]\(([\w-]+\.md)", index.read_text(encoding="utf-8")))
    assert {p.name for p in PAGES if p.parent == index.parent} - {"index.md"} <= listed


@pytest.mark.parametrize("page", ["points", "finetuning"])
def test_the_readme_says_what_the_page_of_published_steps_says(page: str) -> None:
    link, text = f"(docs/{page}.md)", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    row = next(line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if link in line)
    figures = re.findall(r"\d+ of \d+|[\d.]+ %", row)
    assert len(figures) > 2
    assert [figure for figure in figures if figure not in text] == []
