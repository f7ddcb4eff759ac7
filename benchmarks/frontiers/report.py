"""Tables, plots and the document of the benchmark of frontiers."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from planner.planfile.budget import format_bytes

Record = dict[str, Any]
COLOURS = {
    "auto": "black",
    "ilp": "tab:blue",
    "sqrt_n": "tab:cyan",
    "chain": "tab:green",
    "checkpoint_all": "tab:brown",
    "lower_sets": "tab:olive",
    "chen": "tab:gray",
    "rotor": "tab:red",
    "torch dp": "tab:purple",
    "torch greedy": "tab:pink",
    "torch ilp": "tab:orange",
}
COMMAND = "python benchmarks/frontier.py"


def percent(value: float | None, digits: int = 2) -> str:
    """A fraction as percent; a dash for None."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def frontier_of(points: Sequence[Record]) -> list[Record]:
    """Points that none beats, by falling peak."""
    best: list[Record] = []
    for point in sorted(points, key=lambda p: (p["peak_bytes"], p["overhead"])):
        if not best or point["overhead"] < best[-1]["overhead"] - 1e-9:
            best.append(point)
    return best[::-1]


def by_method(result: Record) -> dict[str, list[Record]]:
    """All points of every method."""
    groups: dict[str, list[Record]] = {}
    for point in result["points"]:
        groups.setdefault(point["method"], []).append(point)
    return groups


# ---- on the terminal ----------------------------------------------------------------------------------


def show(result: Record) -> None:
    """Print one model's table: every method's own frontier, at most twelve points each."""
    console = Console()
    table = Table(title=f"{result['model']}: {result['description']}", caption=summary(result))
    for heading in ("method", "asked", "peak", "of none", "overhead", "auto there", "solve s"):
        table.add_column(heading, justify="left" if heading in ("method", "asked") else "right")
    auto = by_method(result).get("auto", [])
    for method, points in by_method(result).items():
        shown = frontier_of(points)
        for point in thinned(shown, 12):
            fitting = [p["overhead"] for p in auto if p["peak_bytes"] <= point["peak_bytes"]]
            table.add_row(
                method,
                point["setting"],
                format_bytes(point["peak_bytes"]),
                percent(point["peak_bytes"] / result["peak_bytes"], 1),
                percent(point["overhead"]),
                percent(min(fitting)) if fitting else "-",
                f"{point['solve_seconds']:.2f}",
            )
        table.add_section()
    console.print(table)


def thinned(points: Sequence[Record], most: int) -> list[Record]:
    """At most so many of the points, evenly, both ends among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def summary(result: Record) -> str:
    """One line on a model's run."""
    one, sweep, least = result["one"], result["sweep"], result["least"]
    parts = (
        f"{result['operations']} operations",
        f"nothing recomputed {format_bytes(result['peak_bytes'])}",
        f"eager {format_bytes(result['eager_peak_bytes'])}",
        f"least peak {format_bytes(least['peak_bytes'])}",
        f"process seconds: capture {result['capture_seconds']}, one budget {one['process_seconds']:.2f}, "
        f"sweep of {sweep['budgets']} {sweep['process_seconds']:.2f}",
        "monotone" if sweep["monotone"] else "NOT monotone",
    )
    return "; ".join(parts)


def show_verdict(results: Sequence[Record]) -> None:
    """Print whether auto is beaten anywhere, and the goals."""
    console = Console()
    table = Table(title="auto against the peers, at every peak that a peer reaches")
    for heading in ("model", "peaks", "no worse", "median less", "where not"):
        table.add_column(heading, justify="left" if heading in ("model", "where not") else "right")
    for result in results:
        verdict = result["verdict"]
        count, lost = len(verdict["compared"]), verdict["lost"]
        where = "; ".join(lost_line(c) for c in lost)
        table.add_row(
            result["model"],
            str(count),
            str(count - len(lost)),
            percent(verdict["median_reduction"], 0),
            where,
        )
    console.print(table)
    goals = [(r["model"], g) for r in results for g in r["goals"]]
    if goals:
        table = Table(title="goals")
        for heading in ("model", "peak MiB", "at most", "auto", "reached"):
            table.add_column(heading, justify="left" if heading == "model" else "right")
        for model, goal in goals:
            table.add_row(model, *goal_cells(goal))
        console.print(table)


def lost_line(compared: Record) -> str:
    """Where a peer is better, in words."""
    return (
        f"{compared['method']} {compared['setting']} at {format_bytes(compared['peak_bytes'])}: "
        f"{percent(compared['overhead'])} against {percent(compared['auto'])}"
    )


def goal_cells(goal: Record) -> list[str]:
    """A goal as cells of a table."""
    most = "any" if goal["most"] is None else percent(goal["most"], 1)
    how = "proven impossible" if goal.get("proven_impossible") else ("yes" if goal["reached"] else "no")
    if goal["most"] is not None and goal.get("bound", 0.0) > goal["most"]:
        how = f"no: {percent(goal['bound'])} is proven the least"
        how += ", in whatever order operations run" if goal.get("every_order") else ""
    return [f"{goal['mib']:.4g}", most, percent(goal["overhead"]), how]


# ---- files --------------------------------------------------------------------------------------------


def write(out: Path, result: Record) -> None:
    """Write a model's JSON and plot, and the document of all that are there."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{result['model']}.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    plot(out / f"{result['model']}.svg", result)
    results = [json.loads(p.read_text()) for p in sorted(out.glob("*.json"))]
    out.with_suffix(".md").write_text("\n".join(document(out, results)) + "\n")


def plot(path: Path, result: Record) -> None:
    """Overhead against peak, one line a method."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    settings = {"svg.fonttype": "none", "svg.hashsalt": "frontier", "font.size": 9}
    with mpl.rc_context(settings):
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        for method, points in by_method(result).items():
            line = frontier_of(points)
            if method == "none":
                continue
            axes.plot(
                [p["peak_bytes"] / result["peak_bytes"] * 100 for p in line],
                [p["overhead"] * 100 for p in line],
                marker="." if method != "auto" else None,
                linestyle="-" if len(line) > 1 else "none",
                linewidth=2.2 if method == "auto" else 0.9,
                color=COLOURS.get(method),
                label=method,
                zorder=3 if method == "auto" else 2,
            )
        for goal in result["goals"]:
            if goal["most"] is not None:
                axes.plot(
                    goal["mib"] * 2**20 / result["peak_bytes"] * 100,
                    goal["most"] * 100,
                    "x",
                    color="black",
                    zorder=4,
                )
        axes.set_xlabel("peak, % of the schedule that recomputes nothing")
        axes.set_ylabel("overhead, %")
        axes.set_title(result["model"])
        axes.set_xlim(0, 102)
        axes.set_ylim(bottom=-0.5)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def document(out: Path, results: Sequence[Record]) -> Iterator[str]:
    """The lines of the document."""
    yield "# Frontiers of memory and time\n"
    yield (
        f"Made by `{COMMAND}`, with the options that stand at each model; the numbers are in the JSON files "
        f"of [{out.name}/]({out.name}/)."
    )
    yield (
        "Dynamic peak of one training step, simulated with workspace zero; *overhead* is extra seconds over "
        "the schedule that recomputes nothing, in the roofline cost model of the device `cpu`. All methods "
        "are judged on the same captured graph by the same simulator. Crosses in the plots are goals.\n"
    )
    yield "## The portfolio (`auto`)\n"
    yield (
        "*Halfway* is a budget in the middle between the least peak and recomputing nothing, solved by "
        "itself; *sweep* is so many budgets in one go. Times are process seconds.\n"
    )
    yield from row("model", "operations", "nothing recomputed", "halfway", "overhead, gap", "least peak",
                   "one budget s", "sweep s", "monotone")  # fmt: skip
    yield "|---" * 9 + "|"
    for r in results:
        one, least, sweep = r["one"], r["least"], r["sweep"]
        yield from row(
            f"[{r['model']}](#{r['model']})",
            f"{r['operations']:,}",
            format_bytes(r["peak_bytes"]),
            format_bytes(one["peak_bytes"]),
            f"{percent(one['overhead'])}, {percent(one['gap'])}",
            f"{format_bytes(least['peak_bytes'])} at {percent(least['overhead'], 1)}",
            f"{one['process_seconds']:.1f}",
            f"{sweep['process_seconds']:.1f} for {sweep['budgets']}",
            "yes" if sweep["monotone"] else "no",
        )
    yield "\n## Against the peers\n"
    yield (
        "At every peak where some peer is not beaten by another: the torch partitioner's points for "
        "`activation_memory_budget`, Chen's cuts, checkpointing every block, Kusumoto's lower sets, rotor, "
        "and the solver `chain` (rotor with several options a block, and polish), which the median leaves "
        "out. *Possible* is the median reduction of a method that met the proven lower bound everywhere.\n\n"
        "On models with dropout (gpt, bert-large, gpt2-xl, t5-base) the partitioner's points are no valid "
        "answers: with `activation_memory_budget` below 1 the gradients under dropout are wrong "
        "([PyTorch 190758](https://github.com/pytorch/pytorch/issues/190758)). They are compared all the "
        "same.\n"
    )
    yield from row("model", "peaks", "auto no worse", "median reduction of overhead", "possible")
    yield "|---" * 5 + "|"
    for r in results:
        verdict = r["verdict"]
        count = len(verdict["compared"])
        better = percent(verdict["median_reduction"], 0)
        possible = percent(verdict.get("most_possible"), 0)
        yield from row(r["model"], str(count), str(count - len(verdict["lost"])), better, possible)
    yield from _short_of_a_quarter(results)
    lost = [f"- {r['model']}: {lost_line(c)}" for r in results for c in r["verdict"]["lost"]]
    yield "\nWhere a peer is better:\n" if lost else "\nNowhere is a peer better."
    yield from lost
    goals = [(r["model"], g) for r in results for g in r["goals"]]
    if goals:
        yield "\n## Goals\n"
        yield "| model | peak MiB | overhead at most | auto | reached |"
        yield "|---|---|---|---|---|"
        for model, goal in goals:
            yield f"| {model} | {' | '.join(goal_cells(goal))} |"
    for r in results:
        yield from _section(out, r)


def command(result: Record) -> str:
    """The command that makes a model's part."""
    settings = result["settings"]
    options = {"models": result["model"], "solvers": ",".join(settings["solvers"])}
    names = ("budgets", "time_limit", "auto_seconds", "solver_seconds", "peer_seconds")
    options |= {n.replace("_", "-"): f"{settings[n]:g}" for n in names if settings.get(n) is not None}
    return " ".join([COMMAND, *(f"--{name} {value}" for name, value in options.items())])


def _short_of_a_quarter(results: Sequence[Record]) -> Iterator[str]:
    """Where the median reduction is below 25 %, and how much of that is proven to be unavoidable."""
    short = [r for r in results if (r["verdict"]["median_reduction"] or 0.0) < 0.25]
    if not short:
        return
    yield "\nWhere the median is below 25 %:\n"
    for r in short:
        verdict = r["verdict"]
        median, possible = verdict["median_reduction"], verdict.get("most_possible")
        if median is None:
            yield f"- {r['model']}: no peer saves memory at a cost there."
        else:
            proven = possible is not None and possible < 0.25
            what = "proves that no method has more than" if proven else "leaves room for"
            most = f"{what} {percent(possible, 0)}" if possible is not None else "is not known"
            yield f"- {r['model']}: {percent(median, 0)}; the lower bound {most}."


def row(*cells: str) -> Iterator[str]:
    """A line of a table."""
    yield f"| {' | '.join(cells)} |"


def _section(out: Path, result: Record) -> Iterator[str]:
    yield f"\n## {result['model']}\n"
    yield f"{result['description']}. {summary(result)}.\n"
    yield f"![frontier of {result['model']}]({out.name}/{result['model']}.svg)\n"
    yield from row("peer", "its peak", "its overhead", "auto there", "proven least")
    yield "|---" * 5 + "|"
    for c in thinned(result["verdict"]["compared"], 10):
        yield (
            f"| {c['method']} {c['setting']} | {format_bytes(c['peak_bytes'])} | {percent(c['overhead'])} | "
            f"{percent(c['auto'])} | {percent(c.get('bound'))} |"
        )
    yield "\n| method | points | median reduction by auto | peaks where it is better |"
    yield "|---|---|---|---|"
    for method, own in result["verdict"]["by_method"].items():
        yield f"| {method} | {own['points']} | {percent(own['median_reduction'], 0)} | {own['lost']} |"
    yield f"\nMade by `{command(result)}`."
    if result["missing"]:
        yield f"Not tried for lack of time: {'; '.join(result['missing'])}."
