"""Headless Chromium through its debugging pipe: load a page, click, look. Needs the browser and nothing else."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0  # seconds for any answer; a machine that is slower than that is stuck

# Text that a reader of the page cannot get at: beyond its edge, or its figure's, and in no box that scrolls.
CUT = """
[...document.querySelectorAll("body *")].filter((e) => {
  const text = [...e.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
  if (!text || !e.checkVisibility() || e.closest("script, option, .scroll, nav")) return false;
  const range = document.createRange();
  range.selectNodeContents(e);
  const own = range.getBoundingClientRect(), figure = e.closest("svg.main-svg")?.getBoundingClientRect();
  const left = figure?.left ?? 0, right = figure?.right ?? innerWidth;
  const hidden = !figure && getComputedStyle(e).overflowX === "hidden" && e.scrollWidth > e.clientWidth;
  return hidden || own.left < left - 0.5 || own.right > right + 0.5;
}).map((e) => e.textContent.trim().slice(0, 60))
"""


def find() -> str | None:
    """The browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One process. DevTools messages go in at its descriptor 3 and come out at 4, each ended by a zero byte."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"]
        # The shell moves the pipe's ends to 3 and 4, wherever they are here.
        move = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", move, "chromium", path, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the process; its profile goes with it."""
        os.close(self._write)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what happens meanwhile goes to `events`."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]  # type: ignore[no-any-return]
            self.events.append(answer)

    def message(self) -> dict[str, Any]:
        """The next message of the browser."""
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            if not data:
                raise RuntimeError("the browser has gone" if ready else f"no answer within {PATIENCE:.0f} s")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)  # type: ignore[no-any-return]

    def open(self, file: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A file in a tab of its own, loaded and drawn."""
        return Page(self, file, width, height, dark)


class Page:
    """A tab. `problems` collects what its console and its network complain about."""

    def __init__(self, browser: Browser, file: Path, width: int, height: int, dark: bool) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        browser.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=file.resolve().as_uri())
        self._loaded()

    def _loaded(self) -> None:
        events = self._browser.events
        while not any(event.get("method") == "Page.loadEventFired" for event in events):
            events.append(self._browser.message())

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        """A narrow page is a phone's: its viewport is what the page's meta element says."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page.

        Raises:
            RuntimeError: it threw.
        """
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression in the page is true; looks at each frame.

        Raises:
            RuntimeError: it has not become true within `PATIENCE`.
        """
        self.js(
            f"new Promise((r) => {{ const look = () => ({condition}) ? r() : requestAnimationFrame(look); look() }})"
        )

    def click(self, selector: str) -> None:
        """A mouse click in the middle of the first element that matches."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{place}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.js(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({place}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def follow(self, selector: str) -> None:
        """Click a link and wait for what it leads to; `problems` are those of the new page."""
        self._browser.events.clear()
        self.click(selector)
        self._loaded()

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select element, as a hand would: its change event fires."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{place}.value = {json.dumps(value)}; {place}.dispatchEvent(new Event('change', {{bubbles: true}}))")

    @property
    def problems(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and requests for anything but the file itself."""
        self.js("1")  # What the browser said before this answer has arrived with it.
        found = []
        for event in self._browser.events:
            method, params = event.get("method"), event.get("params", {})
            if event.get("sessionId") != self._session:
                continue
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(" ".join(str(argument.get("value")) for argument in params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:")):
                    found.append(f"request for {url}")
        return found

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """A PNG of what is in sight, or of the whole page."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
