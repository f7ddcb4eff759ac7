"""Models of the zoo planned for replaying, beside their plans by graphs.

    python benchmarks/zoo.py --backend replay --results out/zoo-replay.jsonl
    python benchmarks/replays.py [--replays out/zoo-replay.jsonl] [--graphs docs/zoo.md]
                                 [--earlier docs/results/replay.md] [--out docs/results/replay.md]
    python benchmarks/zoo.py --backend replay --variant autocast --budgets min --solver sqrt_n \\
        --results out/autocast.jsonl
    python benchmarks/replays.py --variants out/autocast.jsonl [...] --out docs/results/replay-variants.md

Nothing is run: the results of the zoo are read, and for graphs its page. Results of variants are named after
them.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.one_by_one import ROOT, load
from benchmarks.zoo import one_line, verdict
from tests import zoo

BUDGETS = ("70%", "min")
FAR = 1.1
"""A least peak that is more than this times the one by graphs is listed by itself."""


_INTRODUCTION = """\
Made by `python benchmarks/replays.py` of what `python benchmarks/zoo.py --backend replay` had measured, and
of [the zoo](../zoo.md) by graphs. Peaks are what was measured, in KiB over what is there when the step
begins; each is compared with its prediction, and each step with the unplanned one, bit for bit. *extra* is
the predicted time of what runs again. Seconds are process seconds until a step can be solved; the two were
measured at other times and beside other work, so that single ones say little.\
""".splitlines()


_REASONS = """\
Bytes that are alive at the predicted peak, by reason, each with the operators that made most of them. They
add up to it. By reason, what graphs do otherwise:

- *read or made by the operator*: graphs write the gradient of an activation over the one that it is given,
  where that is read no more. Autograd makes a new one.
- *made in the backward, held by its node*: a formula of autograd's holds its own intermediate results until
  it returns, as that of `pow` does. Graphs let go of each behind its last reader.
- *made in the backward, read later*: gradients on their way. Where the model has checkpoints of its own, also
  what these make again, which a replayed plan leaves to them.
- *held by Python*: a local variable of the model's forward has it until the function returns. Graphs do not
  know of variables.
- *not made again*: the reason is that of `planner/replay/repeatable.py`.
- *left by the step*: outputs and gradients, in both ways.
- *made again*, *kept by the plan*, *states of generators*: the solver's choice.\
""".splitlines()


_OF_VARIANTS = """\
Made by `python benchmarks/replays.py --variants` of what `python benchmarks/zoo.py --backend replay --variant
VARIANT --budgets min --solver sqrt_n` had measured: each model is planned for the least peak, run, and
compared with the unplanned step, bit for bit. *Not comparable*: unplanned steps differ from each other.
*Unable*: the model does not run so without a plan either.\
""".splitlines()


class Planned(NamedTuple):
    """A model planned in one of the two ways: process seconds, and by budget KiB and extra time, as text."""

    seconds: float
    peaks: dict[str, tuple[float, str]]
    verdict: str


def by_graphs(page: str) -> dict[str, Planned]:
    """The rows of the zoo's page."""
    found: dict[str, Planned] = {}
    name = ""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 12 or cells[0] == "model" or set(cells[0]) == {"-"}:
            continue
        if cells[0]:
            name = cells[0]
            found[name] = Planned(float(cells[4] or 0), {}, cells[11])
        if re.fullmatch(r"[\d,.]+", cells[8]):
            found[name].peaks[cells[7]] = float(cells[8].replace(",", "")), cells[10]
    return found


def by_replays(row: dict[str, Any]) -> Planned:
    """A row of the zoo's results."""
    peaks = {
        text: (result["measured_bytes"] / 1024, f"{result['overhead']:+.1%}")
        for text, result in row.get("budgets", {}).items()
        if "ok" in result
    }
    return Planned(row.get("capture_seconds", 0.0), peaks, verdict(row))


def of_page(page: str) -> dict[str, Planned]:
    """The replays of a page that :func:`markdown` made."""
    found: dict[str, Planned] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 13 and cells[0] != "model" and set(cells[0]) != {"-"}:
            there = {text: cells[2 + 2 * i : 4 + 2 * i] for i, text in enumerate(BUDGETS)}
            peaks = {
                text: (float(peak.replace(",", "")), extra) for text, (peak, extra) in there.items() if peak
            }
            found[cells[0]] = Planned(float(cells[1] or 0), peaks, cells[6])
    return found


def markdown(
    rows: dict[str, dict[str, Any]], graphs: dict[str, Planned], made: int, earlier: dict[str, Planned]
) -> str:
    """Both as a page of the documentation; models that have no row are as on an earlier page."""
    there = [name for name in zoo.everything() if name in rows or name in earlier]
    missing = {name for name, row in rows.items() if "ModuleNotFoundError" in row.get("failed", "")}
    names = [name for name in there if name not in missing]
    replays = {name: by_replays(rows[name]) if name in rows else earlier[name] for name in names}
    verdicts = [replays[name].verdict for name in names]
    rows = {name: rows.get(name, {}) for name in names}
    said = [name for name in names if rows[name].get("warnings")]
    before = sum(not row for row in rows.values())
    least = {
        name: replays[name].peaks["min"][0] / graphs[name].peaks["min"][0]
        for name in names
        if "min" in replays[name].peaks and "min" in graphs.get(name, Planned(0.0, {}, "")).peaks
    }
    seconds = [
        replays[name].seconds / graphs[name].seconds
        for name in names
        if name in graphs and graphs[name].seconds and replays[name].seconds
    ]
    lines = [
        "# Replays beside graphs",
        "",
        *_INTRODUCTION,
        "",
        f"- {len(names)} models of {made} were run: "
        + ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
        + (f"; {len(there) - len(names)} need packages that were not there" if there != names else ""),
        *(
            [f"- {before} of the rows are of an earlier page, of states before the last changes"]
            if before
            else []
        ),
        f"- {len(said)} were warned of{': ' + ', '.join(said) if said else ''}",
    ]
    if least:
        far = sorted((name for name in least if least[name] > FAR), key=lambda name: -least[name])
        lines += [
            f"- least peaks: {statistics.median(least.values()):.3f} times those by graphs in the median of "
            f"{len(least)}; {sum(ratio <= 1.02 for ratio in least.values())} at most 1.02 times, {len(far)} "
            f"more than {FAR} times"
            + (f" ({', '.join(f'{name} {least[name]:.2f}' for name in far)})" if far else ""),
            f"- seconds of planning: {statistics.median(seconds):.2f} times those by graphs in the median of "
            f"{len(seconds)}",
        ]
    head = ["model", "seconds", "70%", "extra", "least", "extra", "verdict"]
    head += ["graphs: seconds", "70%", "extra", "least", "extra", "verdict"]
    lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in names:
        cells = [*_cells(replays[name]), *_cells(graphs.get(name, Planned(0.0, {}, "")))]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    if least:
        lines += ["", *_explained({name: least[name] for name in far}, graphs, rows)]
    notes = [f"- `{name}`: {one_line(text)}" for name in names for text in _said(rows[name])]
    return "\n".join([*lines, "", *(["## What was said", "", *notes, ""] if notes else [])])


def of_variants(results: dict[str, dict[str, dict[str, Any]]], made: int) -> str:
    """The results of variants as a page of the documentation, by the names of the variants and models."""
    head = [
        "variant",
        "models",
        "ok",
        "not comparable",
        "unable",
        "refused",
        "OVER BUDGET",
        "DIFFERENT",
        "FAILED",
    ]
    lines = [
        "# Replays of other steps of the same models",
        "",
        *_OF_VARIANTS,
        "",
        "| " + " | ".join([*head, "measured is predicted"]) + " |",
        "|" + "---|" * (len(head) + 1),
    ]
    others: list[str] = []
    for name, rows in results.items():
        verdicts = {model: verdict(row) for model, row in rows.items()}
        done = [b for row in rows.values() for b in row.get("budgets", {}).values() if "ok" in b]
        exact = sum(b["measured_bytes"] == b["predicted_bytes"] for b in done)
        counts = [sum(word == found for found in verdicts.values()) for word in head[2:]]
        cells = [name, f"{len(rows)} of {made}", *map(str, counts), f"{exact} of {len(done)}"]
        lines.append("| " + " | ".join(cells) + " |")
        for model, word in verdicts.items():
            if word != "ok":
                said = next(_said(rows[model]), "") or "; ".join(
                    problem for b in rows[model]["budgets"].values() for problem in b.get("problems", ())[:1]
                )
                others.append(f"- {name}, `{model}`: {word}: {one_line(said)}")
    return "\n".join([*lines, "", "## Those that are not ok", "", *others, ""])


def _explained(
    far: dict[str, float], graphs: dict[str, Planned], rows: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """What is alive at the least peaks that are far above those by graphs."""
    yield from ["## What is alive at the least peaks that are far from those by graphs", "", *_REASONS, ""]
    for name, ratio in far.items():
        result = rows[name].get("budgets", {}).get("min", {})
        if (found := result.get("at_peak")) is None:
            continue
        more = result["measured_bytes"] - int(1024 * graphs[name].peaks["min"][0])
        parts = [
            f"{count:,} {reason}" + (f" ({', '.join(found['of'][reason])})" if reason in found["of"] else "")
            for reason, count in found["bytes"].items()
        ]
        yield f"- `{name}`: {ratio:.2f} times, {more:,} bytes more. At {found['operator']}:"
        yield f"  {'; '.join(parts)}. Together {sum(found['bytes'].values()):,}"


def _cells(planned: Planned) -> list[str]:
    cells = [f"{planned.seconds:.1f}" if planned.seconds else ""]
    for budget in BUDGETS:
        peak = planned.peaks.get(budget)
        cells += ["", ""] if peak is None else [f"{peak[0]:,.1f}", peak[1]]
    return [*cells, planned.verdict]


def _said(row: dict[str, Any]) -> Iterator[str]:
    yield from (row[key] for key in ("refused", "unable", "failed") if key in row)
    yield from row.get("warnings", ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=Path, default=ROOT / "out" / "zoo-replay.jsonl")
    parser.add_argument("--graphs", type=Path, default=ROOT / "docs" / "zoo.md")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "replay.md")
    parser.add_argument("--earlier", type=Path, help="an earlier page, for models that have no results")
    parser.add_argument("--variants", type=Path, nargs="+", help="results of variants, for a page of them")
    options = parser.parse_args()
    if options.variants:
        results = {path.stem: load(path) for path in options.variants}
        options.out.write_text(of_variants(results, len(zoo.everything())))
        return
    earlier = {} if options.earlier is None else of_page(options.earlier.read_text())
    graphs = by_graphs(options.graphs.read_text())
    options.out.write_text(markdown(load(options.replays), graphs, len(zoo.everything()), earlier))


if __name__ == "__main__":
    main()
