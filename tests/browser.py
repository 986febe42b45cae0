"""A real browser without a window, driven over a pipe: pages are loaded, pointed at, looked at.

Chromium speaks its DevTools protocol over two file descriptors, so no driver, port or package is
needed. The mouse is the browser's own: its events take the way of a user's.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60.0
_OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--no-default-browser-check",
)  # fmt: skip


class Page:
    """A page in the browser, and everything that went wrong in it.

    Attributes:
        problems: Exceptions, messages of the console, and requests for other files.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []

    def call(self, method: str, **parameters: Any) -> Any:
        """A command of the protocol."""
        return self._browser.call(method, parameters, self._session)

    def js(self, expression: str) -> Any:
        """The value of an expression, once the page has drawn what it was about to draw."""
        code = (
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
            f".then(() => ({expression}))"
        )
        found = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, x: float, y: float, *, pressed: bool = False) -> None:
        """Move the mouse there."""
        button = {"button": "left", "buttons": 1} if pressed else {}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **button)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the left button at one place and release it at another."""
        button = {"button": "left", "clickCount": 1}
        self.move(*start)
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            if kind == "mouseMoved":
                self.move(x, y, pressed=True)
            else:
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def wheel(self, x: float, y: float, turn: float) -> None:
        """Turn the wheel there; below 0: away from the user."""
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=turn)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


class Browser:
    """A browser of its own, with a profile that ends with it.

    Args:
        executable: Chromium, or what is made from it.
        folder: For its profile.
    """

    def __init__(self, executable: str, folder: Path) -> None:
        theirs, self._to = _pipe()
        self._from, others = _pipe()
        options = [*_OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        if os.geteuid() == 0:
            options.insert(0, "--no-sandbox")  # which root can't have
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        given = [(os.POSIX_SPAWN_DUP2, theirs, 3), (os.POSIX_SPAWN_DUP2, others, 4)]
        self._process = os.posix_spawn(
            executable, [executable, *options], os.environ,
            file_actions=[*quiet, *given], setpgroup=0,
        )  # fmt: skip
        os.close(theirs)
        os.close(others)
        self._last = 0
        self._rest = b""
        self._pages: dict[str, Page] = {}

    def open(self, path: Path, width: int = 1200, height: int = 800) -> Page:
        """Load a file and wait until its script has run."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        page.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + _SECONDS
        while page.js("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < end, f"{path} was not loaded within {_SECONDS:.0f} s"
        return page

    def call(self, method: str, parameters: dict[str, Any], session: str = "") -> Any:
        """A command of the protocol; events that come before its answer are noted."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._last:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self._note(found)

    def _note(self, event: dict[str, Any]) -> None:
        page, about = self._pages.get(event.get("sessionId", "")), event.get("params", {})
        if page is None:
            return
        if event["method"] in {"Runtime.exceptionThrown", "Runtime.consoleAPICalled"}:
            page.problems.append(json.dumps(about))
        if event["method"] == "Log.entryAdded":
            page.problems.append(about["entry"]["text"])
        if event["method"] == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if about.get("type") != "Document" and not url.startswith("data:"):
                page.problems.append(f"asks for {url}")

    def _read(self) -> dict[str, Any]:
        """The next message."""
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {_SECONDS:.0f} s"
            part = os.read(self._from, 2**20)
            assert part, "the browser ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def close(self) -> None:
        """End all its processes."""
        with suppress(OSError, AssertionError):
            self.call("Browser.close", {})
        end = time.monotonic() + 10
        while os.waitpid(self._process, os.WNOHANG) == (0, 0) and time.monotonic() < end:
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._process, 0)
        os.close(self._to)
        os.close(self._from)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are behind the numbers that the browser's get."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser for some tests, which are skipped where none is installed."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed ({', '.join(NAMES)}): apt-get install chromium")
    it = Browser(found, folder)
    try:
        yield it
    finally:
        it.close()
