"""Times against peaks of the ways to train under Inductor, one panel a model, from the table that tells them.

    python benchmarks/compiled_picture.py [docs/results/compiled.md] [docs/results/compiled.svg]

Each panel has the models' own scales. Where ``activation_memory_budget`` gives wrong gradients, its points
are crosses, and not joined.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

TABLE, PICTURE = Path("docs/results/compiled.md"), Path("docs/results/compiled.svg")
Row = dict[str, str]
STYLES: dict[str, dict[str, object]] = {
    "eager": {"marker": "s", "color": "tab:gray", "linestyle": "none"},
    "Inductor": {"marker": "D", "color": "black", "linestyle": "none"},
    "Inductor, activation_memory_budget": {"marker": "o", "color": "tab:orange", "linewidth": 0.9},
    "eager, checkpoint per block": {"marker": "v", "color": "tab:olive", "linestyle": "none"},
    "Inductor, checkpoint per block": {"marker": "^", "color": "tab:green", "linestyle": "none"},
    "eager + plan": {"marker": ".", "color": "tab:blue", "linewidth": 0.9, "linestyle": "--"},
    "Inductor + plan": {"marker": ".", "color": "tab:blue", "linewidth": 2.0},
}
"""The ways that are drawn, and how."""
WRONG: dict[str, object] = {"marker": "x", "color": "tab:orange", "linestyle": "none"}


def rows_of(lines: Sequence[str]) -> Iterator[Row]:
    """The rows of a Markdown table whose first column is the model."""
    names: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| model |"):
            names = cells
        elif line.startswith("| ") and len(cells) == len(names):
            yield dict(zip(names, cells, strict=True))


def way_of(row: Row) -> str | None:
    """Which of the ways a row is of; None if it is not drawn."""
    name = row["way"]
    return next((way for way in sorted(STYLES, key=len, reverse=True) if name.startswith(way)), None)


def points(rows: Sequence[Row], way: str, wrong: bool = False) -> list[tuple[float, float]]:
    """Peaks in MiB and times in ms of a way, by peak."""
    return sorted(
        (float(row["peak, MiB"].removesuffix(" (over)")), float(row["step, ms"]))
        for row in rows
        if way_of(row) == way and row["step, ms"] and ("wrong" in row["error of gradients"]) == wrong
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    across = 3
    down = -(-len(models) // across)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "compiled", "font.size": 8}):
        figure, panels = plt.subplots(
            down, across, figsize=(9.6, 2.5 * down + 0.6), layout="constrained", squeeze=False
        )
        for axes, model in zip(panels.flat, models, strict=False):
            own = [row for row in rows if row["model"] == model]
            for way, style in STYLES.items():
                if found := points(own, way):
                    axes.plot(*zip(*found, strict=True), label=way, markersize=4, **style)
                if found := points(own, way, wrong=True):
                    axes.plot(*zip(*found, strict=True), label=f"{way}, wrong", markersize=4, **WRONG)
            axes.set_title(model)
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
        for axes in panels.flat[len(models) :]:
            axes.set_axis_off()
        labels = {
            label: line
            for axes in panels.flat
            for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(labels.values(), labels.keys(), loc="outside upper center", ncols=4, fontsize=8)
        figure.supxlabel("peak over entry, MiB")
        figure.supylabel("step, ms")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


if __name__ == "__main__":
    table, picture = (Path(given) for given in (sys.argv[1:] + [TABLE, PICTURE][len(sys.argv) - 1 :]))
    draw(list(rows_of(table.read_text().splitlines())), picture)
