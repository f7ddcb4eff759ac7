"""The report of a small BERT's plan, of BERT-Large and of an LSTM of 29,005 operations, opened in Chromium.

    python benchmarks/reports.py [--reports bert,bert-large,lstm-1000] [--plans FOLDER] [--pictures docs]
                                 [--out docs/results/reports.md]

Each model is planned, unless the folder has its plan, and its report is opened some times in a headless
Chromium, in light and dark and in a narrow window. Seconds are from the start of loading: until anything is
seen, until all is drawn. Then: hovering over the timeline, zooming and searching, and whether the page says
what the plan says. Exits with 1 if a report is later than 2 s, larger than 5 MB, has said anything on the
console, asks for anything on a network, or has other figures than its plan.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import planner
from benchmarks import models
from benchmarks.chromium import CHROMIUM, Chromium
from examples import bert
from planner.report.page.data import page_data

FIRST_PAINT_SECONDS, MOST_BYTES = 2.0, 5_000_000
TIMES = 5

_HOVER = """(async () => {
  const over = document.querySelector("#chart .u-over"), box = over.getBoundingClientRect(), took = [];
  over.dispatchEvent(new MouseEvent("mouseenter", { clientX: box.left, clientY: box.top + 40 }));
  for (let i = 1; i <= 20; i++) {
    const before = performance.now(), old = document.getElementById("moment").dataset.step;
    over.dispatchEvent(new MouseEvent("mousemove",
      { clientX: box.left + box.width * i / 21, clientY: box.top + 40, bubbles: true }));
    for (let turn = 0; turn < 20 && document.getElementById("moment").dataset.step === old; turn++)
      await new Promise(requestAnimationFrame);
    took.push(performance.now() - before);
  }
  return Math.max(...took) / 1000;
})()"""
_ZOOM = """(() => { const before = performance.now(); document.querySelector("[data-do=peak]").click();
  document.querySelector("[data-do=in]").click(); const took = performance.now() - before;
  document.querySelector("[data-do=all]").click(); return took / 1000; })()"""
_SEARCH = """(() => { const box = document.getElementById("search"), before = performance.now();
  box.value = "mm re-run"; sift(); const took = performance.now() - before; box.value = ""; sift();
  return took / 1000; })()"""
_FIGURES = """(() => { actions.peak(); const m = document.getElementById("moment").dataset;
  const text = id => document.getElementById(id).textContent;
  return { step: Number(m.step), bytes: Number(m.bytes),
    legend: text("legend"), facts: text("facts"), count: text("count") }; })()"""


@dataclass(frozen=True)
class Measured:
    """What was seen of a report."""

    file_bytes: int
    paint_seconds: list[float]
    drawn_seconds: list[float]
    """Of each opening."""
    hover_seconds: float
    """The slowest of twenty moves of the mouse."""
    zoom_seconds: float
    search_seconds: float
    problems: list[str]


def _bert() -> planner.Plan:
    model, args, kwargs = bert.build()
    return planner.plan(model, args, kwargs, budget="60%", optimizer="adamw")


def _bert_large() -> planner.Plan:
    model, args, kwargs = models.build("bert-large")
    return planner.plan(model, args, kwargs, budget="31GiB", device="V100-32GB")


def _lstm() -> planner.Plan:
    model, args, kwargs = models.build("lstm-1000")
    return planner.plan(model, args, kwargs, budget="30%")


_Make = Callable[[], planner.Plan]
REPORTS: dict[str, tuple[str, str, _Make]] = {
    "bert": ("the demo's BERT at 60 %", "report", _bert),
    "bert-large": ("BERT-Large, 32 x 512 tokens, within 31 GiB of a V100", "report-bert-large", _bert_large),
    "lstm-1000": ("an LSTM cell unrolled 1,000 times, 29,005 operations, at 30 %", "report-lstm", _lstm),
}
"""By name: in words, the name of its pictures, and what plans it."""


def look_at(plan: planner.Plan, report: Path, *, times: int = TIMES, pictures: str | None = None) -> Measured:
    """Open a report and use it.

    Args:
        plan: The plan that the report is of.
        report: The file.
        times: How often it is opened, half of them in dark colours.
        pictures: The path of pictures to be made of it, without their endings.

    Raises:
        BrowserError: There is no browser, or the page is not drawn.
    """
    problems, paints, drawn = [], [], []
    size = report.stat().st_size
    with Chromium() as browser:
        for i in range(times):
            dark = i % 2 == 1
            browser.look(height=1480, dark=dark)
            seconds = browser.open(report)
            paints.append(seconds["paint"])
            drawn.append(seconds["drawn"])
            if pictures is not None and i < 2:
                browser.picture(Path(f"{pictures}{'-dark' if dark else ''}.png"))
        hover, zoom, search = (float(browser.value(script)) for script in (_HOVER, _ZOOM, _SEARCH))
        problems += _other_figures(plan, browser)
        browser.look(width=390, height=800)
        browser.open(report)
        if not browser.value("document.documentElement.scrollWidth <= innerWidth"):
            problems.append("wider than a window of 390 pixels")
        problems += [f"console: {line}" for line in browser.console]
    # A page that was not seen has no time, and is late as well.
    if not max(paints) < FIRST_PAINT_SECONDS:
        problems.append(f"first paint after {max(paints):.2f} s")
    if size >= MOST_BYTES:
        problems.append(f"{size / 1e6:.1f} MB")
    return Measured(size, paints, drawn, hover, zoom, search, problems)


def _other_figures(plan: planner.Plan, browser: Chromium) -> list[str]:
    seen = browser.value(_FIGURES)
    peak, before = plan.predicted.dynamic_peak_bytes, plan.baseline.dynamic_peak_bytes
    operations = len(page_data(plan)["ops"]["name"])
    found = []
    if seen["bytes"] != peak:
        found.append(f"the peak is {seen['bytes']} in the page, {peak} in the plan")
    for text, place in (
        (f"planned, at most {planner.format_bytes(peak)}", "legend"),
        (f"at most {planner.format_bytes(before)}", "legend"),
        (planner.format_bytes(plan.predicted.peak_bytes), "facts"),
        (f"{plan.overhead:+.1%}", "facts"),
        (f"of {operations:,} operations", "count"),
    ):
        if text not in seen[place]:
            found.append(f"{text!r} is not in {seen[place]!r}")
    return found


def _table(rows: list[tuple[str, planner.Plan, Measured]]) -> str:
    lines = [
        "| report of | operations | steps | MB | first paint, s | all drawn, s | slowest hover, s | zoom, s "
        "| search, s | problems |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for words, plan, m in rows:
        data = page_data(plan)
        operations, steps = len(data["ops"]["name"]), len(data["live"])
        several = " | ".join(
            f"{statistics.median(s):.2f}, at most {max(s):.2f}" for s in (m.paint_seconds, m.drawn_seconds)
        )
        used = " | ".join(f"{s:.3f}" for s in (m.hover_seconds, m.zoom_seconds, m.search_seconds))
        size, problems = f"{m.file_bytes / 1e6:.2f}", "; ".join(m.problems) or "none"
        lines.append(f"| {words} | {operations:,} | {steps:,} | {size} | {several} | {used} | {problems} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Open reports in a headless Chromium and measure them.")
    parser.add_argument("--reports", default=",".join(REPORTS), help="names, separated by commas")
    parser.add_argument("--plans", type=Path, default=Path("out/reports"), help="keeps plans and reports")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of the reports")
    parser.add_argument("--out", type=Path, help="a file for the table, with what it says")
    options = parser.parse_args()
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    names = options.reports.split(",")
    if unknown := set(names) - set(REPORTS):
        parser.error(f"no report {', '.join(sorted(unknown))}; there are {', '.join(REPORTS)}")
    options.plans.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        words, picture, make = REPORTS[name]
        file = options.plans / f"{name}.json"
        start = time.perf_counter()
        if not file.exists():
            make().save(file)
        plan = planner.Plan.load(file)
        planned = time.perf_counter()
        plan.report(report := file.with_suffix(".html"))
        print(
            f"{name}: planned in {planned - start:.1f} s, written in {time.perf_counter() - planned:.1f} s",
            file=sys.stderr,
        )
        pictures = None if options.pictures is None else str(options.pictures / picture)
        rows.append((words, plan, look_at(plan, report, pictures=pictures)))
    table = _table(rows)
    print(table)
    if options.out is not None:
        options.out.write_text(_document(table))
    sys.exit(1 if any(m.problems for _, _, m in rows) else 0)


def _document(table: str) -> str:
    assert CHROMIUM is not None
    version = subprocess.run(
        [CHROMIUM, "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return f"""# Reports in a browser

Reports of plans, opened in a headless Chromium ({version.partition(" built")[0]}) without a graphics card:
medians of {TIMES} openings. Seconds are from the start of loading; "all drawn" is one frame after the
page's scripts. A problem is anything on the console, anything asked for on a network, a figure that is not
the plan's, a page that is wider than a narrow window, a first paint after {FIRST_PAINT_SECONDS:g} s, or a
file over {MOST_BYTES / 1e6:g} MB.

    make reports

{table}

Pictures: [the demo's BERT](../report.png), [dark](../report-dark.png);
[BERT-Large](../report-bert-large.png), [dark](../report-bert-large-dark.png);
[the LSTM](../report-lstm.png), [dark](../report-lstm-dark.png).
"""


if __name__ == "__main__":
    main()
