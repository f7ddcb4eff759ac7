"""Opens a page in a headless Chromium; tells what a script found in it, and the output of its console."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class Seen:
    result: str
    """The text that the script returned."""
    console: list[str]
    """The lines that the page wrote to the console."""


def run_in_browser(page: str, script: str, folder: Path) -> Seen:
    """Open a page, run a script in it after its own, and return the script's result.

    Args:
        page: The HTML.
        script: The body of an async function that returns a string.
        folder: A folder for the file and the browser's profile.
    """
    assert CHROMIUM is not None
    ours = (
        "<script>(async () => { let text; try { text = await (async () => {" + script + "})(); } "
        "catch (e) { text = 'FAILED ' + e.stack; } const p = document.createElement('pre'); p.id = 'result'; "
        "p.textContent = text; document.body.append(p); })();</script></body>"
    )
    path = folder / "page.html"
    path.write_text(page.replace("</body>", ours))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
         "--enable-logging=stderr", "--window-size=1200,900", f"--user-data-dir={folder / 'profile'}",
         "--virtual-time-budget=20000", path.as_uri()],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(unescape(found[1]), console)
