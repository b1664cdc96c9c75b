"""A real browser for tests of pages: headless Chromium, asked over its own pipe. Where there is none, a test skips."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
    "--no-first-run", "--hide-scrollbars", "--proxy-server=127.0.0.1:9", "--remote-debugging-pipe",
)  # fmt: skip


class Tab:
    """One page of the browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._buffer, self._number = to_browser, from_browser, b"", 0
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def ask(self, method: str, **params: object) -> Any:
        """The browser's answer to one command of its protocol."""
        self._number += 1
        record = {"id": self._number, "method": method, "params": params}
        if self._session:
            record["sessionId"] = self._session
        os.write(self._to, json.dumps(record).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                part = os.read(self._from, 1 << 20)
                assert part, "the browser ended"
                self._buffer += part
            message, _, self._buffer = self._buffer.partition(b"\0")
            said = json.loads(message)
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]

    def open(self, path: Path, width: int) -> None:
        """Loads a file at a width of the window."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=path.resolve().as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        said = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Presses a key, as `Tab` with code 9; `text` is what it types, a carriage return for `Enter`."""
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def picture(self, path: Path, height: int = 0) -> None:
        """Writes the page, or its upper part, as a PNG."""
        width, whole = self.run("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height or whole, "scale": 1}
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))


def _pipe() -> tuple[int, int]:
    """A pipe whose ends lie above the numbers at which the browser expects its own."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A browser without a network, with an empty folder as its profile; the test is skipped where none is installed."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)} is on the PATH")
    theirs_in, ours_out = _pipe()
    ours_in, theirs_out = _pipe()
    command = [program, *FLAGS, f"--user-data-dir={profile}"]
    launch = f"import os; os.dup2({theirs_in}, 3); os.dup2({theirs_out}, 4); os.execv({program!r}, {command!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", launch],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs_in, theirs_out),
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(ours_out, ours_in)
    finally:
        process.kill()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
