"""Tables that leave columns out where a terminal is too narrow for all of them."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from planner.errors import printable

Cell = str | Text

GAP = 2
"""Blanks between columns."""
_LABEL = 36
"""Columns are left out before a label gets fewer characters than this; longer labels may be folded."""


def fitted_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    width: int,
    least: Sequence[str] = (),
    folded: bool = False,
) -> Table:
    """Lay out rows whose first cell is a label, within a number of characters.

    Args:
        headers: The names of the columns.
        rows: A cell for each column; rows may be shorter.
        width: Characters that a line may take.
        least: Columns that may be left out, in this order; if that is not enough, labels are folded.
        folded: Whether the other cells, which are texts then, not figures, are folded rather than labels.
    """
    cells = [[_visible(cell) for cell in row] for row in rows]
    titles = [_visible(name) for name in headers]
    widths = [
        max([title.cell_len, *(row[i].cell_len for row in cells if i < len(row))])
        for i, title in enumerate(titles)
    ]
    shown = list(range(len(headers)))
    for name in least:
        if min(widths[0], _LABEL) + sum(GAP + widths[i] for i in shown[1:]) <= width:
            break
        shown = [i for i in shown if headers[i] != name]
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    if folded:
        most = (width - min(widths[0], _LABEL)) // max(len(shown) - 1, 1) - GAP
        widths[1:] = [min(each, max(most, 8)) for each in widths[1:]]
    room = width - sum(GAP + widths[i] for i in shown[1:])
    table.add_column(titles[0], overflow="fold", max_width=max(room, 8))
    for i in shown[1:]:
        if folded:
            table.add_column(titles[i], justify="right", overflow="fold", max_width=widths[i])
        else:
            table.add_column(titles[i], justify="right", no_wrap=True)
    for row in cells:
        table.add_row(*(row[i] for i in shown if i < len(row)))
    return table


def _visible(cell: Cell) -> Text:
    """A cell as plain text: nothing in it is read as markup, and control characters are written out."""
    if isinstance(cell, Text):
        return cell if cell.plain.isprintable() else Text(printable(cell.plain), style=cell.style)
    return Text(printable(cell))
