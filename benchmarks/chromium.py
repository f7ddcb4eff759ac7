"""Pages in a headless Chromium, over its debugging protocol through a pipe: no driver is needed."""

import base64
import io
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from PIL import Image

from tests.browser import CHROMIUM

_WATCH = """
new MutationObserver((_, watching) => {
  if (document.documentElement.dataset.ready) {
    watching.disconnect();
    performance.mark("ready");
    requestAnimationFrame(() => setTimeout(() => performance.mark("drawn")));
  }
}).observe(document, { attributes: true, subtree: true, attributeFilter: ["data-ready"] });
"""

_NAMES = ("paint", "ready", "drawn")
_TIMES = (
    '["first-paint", "ready", "drawn"].map(name => performance.getEntriesByName(name)[0]?.startTime ?? null)'
)


class BrowserError(RuntimeError):
    """There is no browser, or it did not do what it was asked for."""


class Chromium:
    """A headless Chromium with one tab, and what its console said.

    Args:
        seconds: How long an answer may take.
    """

    def __init__(self, seconds: float = 60) -> None:
        if CHROMIUM is None:
            raise BrowserError("there is no Chromium: install it, as with `apt-get install chromium`")
        self.console: list[str] = []
        """Errors and warnings of the page, of its scripts and of its network."""
        self._seconds = seconds
        self._number = 0
        self._unread = b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        os.set_blocking(self._read, False)
        # Chromium reads descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *options, "--remote-debugging-pipe",
             f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        targets = self._ask("Target.getTargets", session=None)["targetInfos"]
        tab = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session: str | None = None
        attached = self._ask("Target.attachToTarget", {"targetId": tab, "flatten": True}, session=None)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def look(self, *, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window in pixels, and which colours the reader prefers."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> dict[str, float]:
        """Open a report and wait until it is drawn.

        Returns:
            Seconds from the start of loading: ``paint``, when anything was seen first, ``ready``, when the
            page's scripts were done, and ``drawn``, one frame later.

        Raises:
            BrowserError: It is not drawn in time, as where a script of it fails.
        """
        self.ask("Page.navigate", url=path.absolute().as_uri())
        end = time.monotonic() + self._seconds
        while None in (times := self.value(f"location.href === 'about:blank' ? [null] : {_TIMES}")):
            if time.monotonic() > end:
                raise BrowserError(f"{path} is not drawn after {self._seconds} s; console: {self.console}")
            time.sleep(0.05)
        return {name: milliseconds / 1000 for name, milliseconds in zip(_NAMES, times, strict=True)}

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript in the page gives; a promise is waited for.

        Raises:
            BrowserError: It throws.
        """
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write what is seen, as PNG of few colours."""
        seen = base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
        Image.open(io.BytesIO(seen)).convert("RGB").quantize(128).save(path, optimize=True)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol for the tab.

        Raises:
            BrowserError: The browser refuses, or does not answer in time.
        """
        return self._ask(method, parameters, session=self._session)

    def _ask(
        self, method: str, parameters: dict[str, Any] | None = None, *, session: str | None
    ) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self._seconds
        while True:
            answer = self._next(end)
            if answer is None:
                raise BrowserError(f"Chromium does not answer {method} within {self._seconds} s")
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return dict(answer.get("result", {}))
            self._note(answer)

    def _next(self, end: float) -> dict[str, Any] | None:
        while b"\0" not in self._unread:
            if time.monotonic() > end or self._process.poll() is not None:
                return None
            try:
                self._unread += os.read(self._read, 2**20)
            except BlockingIOError:
                time.sleep(0.005)
        text, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        found = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = found["exceptionDetails"]
                self.console.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if found["type"] in ("error", "warning", "assert"):
                said = [str(a.get("value", a.get("description"))) for a in found["args"]]
                self.console.append(" ".join(said))
            case "Log.entryAdded":
                self.console.append(found["entry"]["text"])
            case "Network.requestWillBeSent" if found["request"]["url"].startswith(("http:", "https:", "ws")):
                self.console.append(f"asks for {found['request']['url']}")
