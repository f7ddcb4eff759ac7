"""Mutation tests: each safeguard is disabled in a copy of the repository, and a test must fail.

    python benchmarks/mutate.py [--only smaller-batch,gan] [--json] [--out docs/results/mutations.md]

Each mutation (`benchmarks/mutations/`) names a promise, changes a few lines of the copy as a careless change
would, and names the tests that must then fail. All of these tests run once on the unchanged copy first, where
they must pass. A mutation counts as noticed where pytest ran and a test failed; code that cannot be imported,
and tests that take too long, do not count. The checkout is not touched.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.mutations.belongings import BELONGINGS
from benchmarks.mutations.exactness import EXACTNESS
from benchmarks.mutations.files import FILES
from benchmarks.mutations.hostile import HOSTILE
from benchmarks.mutations.in_place import IN_PLACE
from benchmarks.mutations.inside import INSIDE
from benchmarks.mutations.loops import LOOPS
from benchmarks.mutations.models import MODELS
from benchmarks.mutations.offload import OFFLOAD
from benchmarks.mutations.pieces import PIECES
from benchmarks.mutations.ranks import RANKS
from benchmarks.mutations.record import Mutation, StaleMutationError
from benchmarks.mutations.replays import REPLAYS
from benchmarks.mutations.shapes import SHAPES
from benchmarks.mutations.shown import SHOWN
from benchmarks.mutations.steps import STEPS

ROOT = Path(__file__).resolve().parent.parent

THEMES = {
    "Every step": STEPS,
    "Replays": REPLAYS,
    "Losses in pieces, arenas, patches": PIECES,
    "Results on the host": OFFLOAD,
    "Shapes": SHAPES,
    "Training loops": LOOPS,
    "Models": MODELS,
    "What users have inside": INSIDE,
    "Exactness": EXACTNESS,
    "Sums and writes in place": IN_PLACE,
    "What is the user's": BELONGINGS,
    "Data-parallel training": RANKS,
    "Plan files and solvers": FILES,
    "Files and names of others": HOSTILE,
    "Reports and explanations": SHOWN,
}
MUTATIONS: list[Mutation] = [one for theme in THEMES.values() for one in theme]


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest said.

    Attributes:
        status: Its exit status; None where it took too long.
        failed: Tests that failed, each with the first words of why.
        skipped: Its lines on tests that were skipped.
        seconds: Wall seconds.
        text: The end of what it wrote.
    """

    status: int | None
    failed: list[tuple[str, str]]
    skipped: list[str]
    seconds: float
    text: str


@dataclass(frozen=True)
class Row:
    """The result for one mutation: the ``test`` that failed, and ``why``; where none did, why not."""

    name: str
    promise: str
    disabled: str
    noticed: bool
    test: str
    why: str
    seconds: float


def copy_tracked(target: Path) -> None:
    """Copy the tracked files of the repository, as they are in the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)


def run_tests(copy: Path, cache: Path, tests: Sequence[str], seconds: float, *options: str) -> Outcome:
    """Run tests in a copy of the repository, in a process group of its own that ends with them."""
    inductor = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    environment = (
        {"OMP_NUM_THREADS": "1"}
        | os.environ
        | {
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "1",  # a change within a second of another would go unseen
            "XDG_CACHE_HOME": str(cache),  # what a mutated planner measures stays out of the cache
            "TORCHINDUCTOR_CACHE_DIR": inductor.name,  # programs of an unchanged planner would be found there
            "COLUMNS": "1000",
            "NO_COLOR": "1",
        }
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *options, *tests]
    started = time.perf_counter()
    with inductor, tempfile.TemporaryFile("w+") as written:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written.seek(0)
        text = written.read()
    lines = text.splitlines()
    failed = [
        line.removeprefix("FAILED ").partition(" - ")[::2] for line in lines if line.startswith("FAILED ")
    ]
    skipped = [line for line in lines if line.startswith("SKIPPED ")]
    return Outcome(status, failed, skipped, time.perf_counter() - started, "\n".join(lines[-60:]))


def judge(one: Mutation, outcome: Outcome) -> Row:
    """Whether a mutation was noticed."""
    noticed = outcome.status == 1 and bool(outcome.failed)
    test, why = outcome.failed[0] if noticed else ("", "")
    if outcome.status is None:
        why = "the tests took too long"
    elif not noticed:
        why = "the tests pass" if outcome.status == 0 else f"pytest ended with {outcome.status}"
    return Row(one.name, one.promise, one.disabled, noticed, test, why[:300], round(outcome.seconds, 1))


def run(mutations: Sequence[Mutation], seconds: float, console: Console) -> list[Row]:
    """Run the tests on the unchanged copy, then with every mutation.

    Raises:
        StaleMutationError: A mutation no longer fits the code, or a test fails on the unchanged copy.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy, cache, used = (Path(folder) / name for name in ("repository", "cache", "used"))
        copy.mkdir()
        cache.mkdir()
        copy_tracked(copy)
        mutated = [one.mutated_files(copy) for one in mutations]
        tests = list(dict.fromkeys(test for one in mutations for test in one.tests))
        console.print(f"{len(tests)} tests on the unchanged copy")
        outcome = run_tests(copy, cache, tests, seconds + 60 * len(tests))
        if outcome.status != 0 or outcome.skipped:
            why = "do not pass" if outcome.status else "are skipped, as something is not installed"
            raise StaleMutationError(f"tests {why} on the unchanged copy:\n{outcome.text}")
        console.print(f"passed in {outcome.seconds:.0f} s")
        for number, (one, texts) in enumerate(zip(mutations, mutated, strict=True), 1):
            shutil.rmtree(used, ignore_errors=True)
            shutil.copytree(cache, used)
            before = {path: path.read_text() for path in texts}
            for path, text in texts.items():
                path.write_text(text)
            try:
                outcome = run_tests(copy, used, one.tests, seconds, "-x")
            finally:
                for path, text in before.items():
                    path.write_text(text)
            rows.append(judge(one, outcome))
            said = f"noticed by {rows[-1].test}" if rows[-1].noticed else f"NOT NOTICED: {rows[-1].why}"
            console.print(
                f"{number}/{len(mutations)} {one.name}: {said} ({rows[-1].seconds:.0f} s)",
                markup=False,
                soft_wrap=True,
            )
            if not rows[-1].noticed:
                console.print(outcome.text, markup=False, soft_wrap=True)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a page of the documentation."""
    found = {row.name: row for row in rows}
    lines = [
        "# Mutation tests",
        "",
        "Made by `python benchmarks/mutate.py --out docs/results/mutations.md`. Each safeguard is disabled",
        "in a copy of the repository, one after the other, and a test of what users rely on must fail. Code",
        "that cannot be imported does not count. Where two rows disable the same code, two promises depend",
        "on it, and each has a test.",
        "",
        f"{sum(row.noticed for row in rows)} of {len(rows)} mutations were noticed, in "
        f"{sum(row.seconds for row in rows) / 60:.0f} minutes.",
    ]
    for theme, mutations in THEMES.items():
        members = [found[one.name] for one in mutations if one.name in found]
        if members:
            lines += [
                "",
                f"## {theme}",
                "",
                "| promise | what is disabled | test that noticed | seconds |",
            ]
            lines += ["|---|---|---|---|"]
            lines += [f"| {r.promise} | {r.disabled} | {_shown(r)} | {r.seconds:.0f} |" for r in members]
    return "\n".join(lines) + "\n"


def _shown(row: Row) -> str:
    if not row.noticed:
        return f"**none**: {row.why}"
    file, _, test = row.test.partition("::")
    return f"`{Path(file).stem}::{test}`".replace("|", "\\|")


def chosen(only: str | None) -> list[Mutation]:
    """The mutations of some names, or all.

    Raises:
        StaleMutationError: There is none of a name.
    """
    names = {one.name: one for one in MUTATIONS}
    wanted = only.split(",") if only else list(names)
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise StaleMutationError(f"there is no mutation {unknown[0]!r}; there are {', '.join(names)}")
    return [names[name] for name in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="names of mutations, with commas between them")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of a mutation")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file as well")
    options = parser.parse_args(arguments)
    try:
        rows = run(chosen(options.only), options.timeout, Console(stderr=True))
    except StaleMutationError as error:
        Console(stderr=True).print(str(error), markup=False, soft_wrap=True)
        return 2
    if options.out is not None:
        options.out.write_text(markdown(rows))
    if options.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
    else:
        table = Table("promise", "what is disabled", "test that noticed", "seconds", show_lines=True)
        for row in rows:
            noticed = row.test if row.noticed else f"NONE: {row.why}"
            cells = (row.promise, row.disabled, noticed, f"{row.seconds:.0f}")
            table.add_row(*map(escape, cells))
        Console().print(table)
    return 0 if all(row.noticed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
