"""Folders of runs that have committed some steps: each such run is made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.runtime.checkpoint.test_commits import schedule_for, train_on

PutCommitted = Callable[[Path, str, int], object]


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> PutCommitted:
    """Puts copies of the folders of such a run into a folder: of a plan of `test_commits.CHOICES`, after some steps."""

    @cache
    def run(choice: str, steps: int) -> Path:
        folder = tmp_path_factory.mktemp("committed")
        train_on(folder, schedule_for(choice), steps)
        return folder

    return lambda folder, choice, steps: shutil.copytree(run(choice, steps), folder, dirs_exist_ok=True)
