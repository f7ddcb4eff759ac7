"""Progress of long work, on stderr."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from planner import progress as reports
from planner.errors import printable

_TEXT_WIDTH = 52
"""Columns for what is being done, the share and the time."""


@contextlib.contextmanager
def shown_progress() -> Iterator[reports.Progress]:
    """Show progress on stderr: a bar on a terminal, elsewhere a line whenever the text changes."""
    if sys.stderr.isatty():
        console = Console(stderr=True)
        bar_width = min(40, max(8, console.width - _TEXT_WIDTH))
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        columns = (text, BarColumn(bar_width), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=1.0)
            yield lambda text, fraction: bar.update(task, description=printable(text), completed=fraction)
        return
    last = ""

    def line(text: str, fraction: float) -> None:
        nonlocal last
        if text != last:
            sys.stderr.write(f"{printable(text)} ({fraction:.0%})\n")
            sys.stderr.flush()
        last = text

    yield line
