"""Models in worker processes, one after the other: one that crashes or takes too long costs itself only."""

import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_each(
    script: str,
    arguments: Sequence[str],
    names: Sequence[str],
    results: Path,
    timeout: float,
    failed: Callable[[str, str], dict[str, Any]],
    said: Callable[[dict[str, Any]], str],
    jobs: int = 1,
) -> None:
    """Run models in worker processes, and append a line of results for each.

    Args:
        script: Started with ``--worker`` and the names; prints a line of JSON for each, as :func:`work` does.
        arguments: Others that it is given.
        names: Of the models.
        results: The file.
        timeout: Seconds that a model may take.
        failed: Makes the row of a model that was not done, of its name and the reason.
        said: What is printed of a row.
        jobs: How many processes work side by side.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()

    def wrote(row: dict[str, Any]) -> None:
        with lock, results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(said(row), file=sys.stderr, flush=True)

    def run(some: Sequence[str]) -> None:
        _run_in_a_worker(script, arguments, some, timeout, failed, wrote)

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(run, names[first::jobs]) for first in range(jobs)]:
            done.result()


def _run_in_a_worker(
    script: str,
    arguments: Sequence[str],
    names: Sequence[str],
    timeout: float,
    failed: Callable[[str, str], dict[str, Any]],
    wrote: Callable[[dict[str, Any]], None],
) -> None:
    waiting = list(names)
    while waiting:
        command = [sys.executable, "-W", "ignore", script, "--worker", ",".join(waiting), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, cwd=ROOT
        ) as worker:
            assert worker.stdout is not None
            with selectors.DefaultSelector() as ready:
                ready.register(worker.stdout, selectors.EVENT_READ)
                while waiting:
                    line = worker.stdout.readline() if ready.select(timeout) else None
                    if line:
                        row = json.loads(line)
                        assert row["model"] == waiting.pop(0)
                    else:
                        worker.kill()
                        ended = f"the process ended ({worker.wait()})"
                        why = f"took more than {timeout:.0f} s" if line is None else ended
                        row = failed(waiting.pop(0), why)
                    wrote(row)
                    if not line:
                        break


def work(names: str, measure: Callable[[str], dict[str, Any]]) -> None:
    """What the worker does: measure each of some models, and print what came of it."""
    results, sys.stdout = sys.stdout, sys.stderr  # a model may print
    for name in names.split(","):
        print(json.dumps(measure(name)), file=results, flush=True)


def load(results: Path) -> dict[str, dict[str, Any]]:
    """The last line of every model."""
    if not results.exists():
        return {}
    rows = (json.loads(line) for line in results.read_text().splitlines())
    return {row["model"]: row for row in rows}
