"""Names from files and modules, shown: nothing moves a cursor, makes a link, hides, turns or runs."""

import io
import json
import re
import sys
import warnings
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from rich.console import Console, Group
from rich.text import Text
from typer.testing import CliRunner

import planner
from planner import environment, errors
from planner.cli.commands import app
from planner.cli.output import show
from planner.cli.progress import shown_progress
from planner.errors import PlanMismatch, printable
from planner.estimation.comparison_table import Comparison, Way
from planner.report.columns import fitted_table
from planner.report.text import Visible, as_html, as_text
from planner.report.verification import render_verification
from planner.user_plan import Plan
from planner.verification.verify import Report

ROOT = Path(__file__).parents[2]
EVIL = (
    "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\\x1b[2J\x9b1A\x07\r\x08\x00\u202e\u2066\u200b\x7f"
    "[link=http://evil]x[/link][/][red]:smile:</script><img src=x onerror=alert(1)>"
    "<svg/onload=alert(1)>$x_1$@@data@@{0}%s"
)
_CHOSEN = {
    "coverage",
    "phase",
    "backend",
    "inputs",
    "outputs",
    "bound_covers",
    "offload",
    "fusion",
    "state_digest",
    "structure",
}
"""Fields of a plan whose texts are one of a few, or identify."""


@cache
def _text() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))
    return planner.plan(model.train(), (torch.ones(64, 8),), budget="min", costs="roofline").dumps()


def _hostile(value: Any, field: str = "") -> Any:
    """A part of a plan with every text that may be anything made hostile."""
    if isinstance(value, dict):
        free = field == "created_with"
        return {EVIL + k if free else k: _hostile(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_hostile(item, field) for item in value]
    if not isinstance(value, str) or (field in _CHOSEN):
        return value
    return EVIL + value


def _document() -> dict[str, Any]:
    document: dict[str, Any] = _hostile(json.loads(_text()))
    document["notes"] = [EVIL, f"a note\nand a line{EVIL}"]
    document["model"] |= {"regions": [EVIL, f"{EVIL}.1"], "autocast": [EVIL]}
    document["peak_holders"].append({"module": EVIL, "bytes": 1})
    return document


@cache
def _plan() -> Plan:
    return Plan.loads(json.dumps(_document()))


def _is_clean(text: str) -> None:
    assert printable(text, keep="\n") == text
    assert "😄" not in text


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Two hostile plan files, whose names are hostile too."""
    found = []
    for i in range(2):
        document = _document()
        document["target"]["costs"] += str(i)
        path = tmp_path / f"{i}\x1b]8;;http:evil\x1b\\[link=x]\r\u202e.json"
        path.write_text(json.dumps(document))
        found.append(str(path))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (lambda a, b: ["show", a], 0),
        (lambda a, b: ["show", "--json", a], 0),
        (lambda a, b: ["diff", a, b], 0),
        (lambda a, b: ["diff", "--json", a, b], 0),
        (lambda a, b: ["explain", a], 0),
        (lambda a, b: ["explain", a, f"{EVIL}0.1"], 0),
        (lambda a, b: ["explain", a, f"no {EVIL}"], 2),
        (lambda a, b: ["report", a, "-o", f"{a}.html"], 0),
        (lambda a, b: ["report", a, "-o", f"/no\x1b[2J/{EVIL[:20]}"], 2),
        (lambda a, b: ["show", f"{a} missing"], 2),
        (lambda a, b: ["show", "--debug", f"{a} missing"], 2),
        (lambda a, b: ["verify", "no such\x1b[2J:build", a], 2),
        (lambda a, b: ["replay", a], 2),
    ],
)
def test_a_command_shows_names_and_does_not_send_them(
    files: tuple[str, str], command: Callable[[str, str], list[str]], code: int
) -> None:
    result = CliRunner().invoke(app, command(*files))
    assert result.exit_code == code, result.output
    assert result.stdout or result.stderr
    _is_clean(result.stdout.replace("\x7f", ""))  # which terminals ignore, and JSON does not write otherwise
    _is_clean(result.stderr)


def test_a_table_says_what_the_names_are(files: tuple[str, str]) -> None:
    shown = "".join(CliRunner().invoke(app, ["diff", *files]).stdout.split())
    for word in (r"\x1b]8;;", r"\u202e", r"\x9b1A", r"\r\x08", "[link=", "[/]", ":smile:"):
        assert word in shown


def test_a_plan_is_shown_in_python_as_it_is_in_a_terminal() -> None:
    plan = _plan()
    for text in (plan.summary(), str(plan), repr(plan), str(plan.explain()), str(plan.explain(f"{EVIL}0"))):
        _is_clean(text)
        assert r"\x1b" in text
    assert "[link=" in plan.summary()


class _Tags(HTMLParser):
    """The tags of a page, and what its scripts hold."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def _tags(page: str) -> _Tags:
    parser = _Tags()
    parser.feed(page)
    return parser


def test_a_page_has_the_same_tags_whatever_names_are() -> None:
    plain, hostile = Plan.loads(_text()), _plan()
    pages = [p.report(frontier=[p]) for p in (plain, hostile)]
    assert _tags(pages[0]).tags == _tags(pages[1]).tags
    assert _tags(pages[0]).attributes == _tags(pages[1]).attributes
    _is_clean(pages[1].replace("\t", ""))
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', pages[1], re.DOTALL)
    assert data is not None
    assert "<" not in data[1]
    assert json.loads(data[1])["model"] == printable(hostile.model.class_name)
    assert "default-src 'none'" in pages[1]  # whatever got into it could not call home
    code = "".join(
        p.read_text() for p in (ROOT / "planner/report/page").glob("*.js") if "uPlot" not in p.name
    )
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", code)


def test_notebooks_show_the_same_tags_whatever_names_are() -> None:
    plain, hostile = Plan.loads(_text()), _plan()
    shown = [(p._repr_html_(), p.explain()._repr_html_()) for p in (plain, hostile)]
    for right, evil in zip(*shown, strict=True):
        assert set(_tags(right).tags) == set(_tags(evil).tags)
        assert set(_tags(right).attributes) == set(_tags(evil).attributes)
        _is_clean(evil)


def test_a_figure_has_no_elements_of_its_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(_document()))
    result = CliRunner().invoke(app, ["show", str(file), "--figure", str(path)])
    assert result.exit_code == 0, result.output
    svg = path.read_text()
    found = {tag.rpartition(":")[2] for tag in _tags(svg).tags}
    assert not found & {"script", "img", "image", "foreignobject", "a", "iframe"}
    assert not any(name.startswith("on") for name in _tags(svg).attributes)
    _is_clean(svg.replace("\t", ""))


def test_markup_in_a_cell_or_a_heading_is_text() -> None:
    table = fitted_table(("[bold]head[/bold]", "[/]"), [("[link=x]a[/link]", Text("\x1b[1mb"))], width=80)
    shown = as_text(table)
    for word in ("[bold]head[/bold]", "[/]", "[link=x]a[/link]", r"\x1b[1mb"):
        assert word in shown
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system=None).print(
        Visible(Text("x", style="link http://evil"))
    )
    assert "evil" not in file.getvalue()
    assert "href" not in as_html(Text("x", style="link http://evil"))


def test_a_report_is_made_visible_whoever_lays_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    for what in (Text(EVIL), EVIL, Group(EVIL, Text(EVIL))):
        assert r"\x1b[2J" in as_text(what, width=1000)
        assert "[link=http://evil]x[/link]" in as_text(what, width=1000)
        _is_clean(as_text(what))
        _is_clean(as_html(what))
        show(what)
    _is_clean(capsys.readouterr().out)


def test_errors_and_warnings_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(_text())
    document["model"]["class_name"] = EVIL + "\n  a line"
    with pytest.raises(PlanMismatch) as found:
        Plan.loads(json.dumps(document)).apply(nn.Sequential())
    _is_clean(str(found.value))
    assert "\n" not in str(found.value)
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.PlannerError)]
    assert len(kinds) > 8
    for kind in kinds:
        more = {"minimum_bytes": 1, "budget_bytes": 1} if kind is errors.InfeasibleBudget else {}
        _is_clean(str(kind(EVIL, **more)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors.warn(EVIL)
    _is_clean(str(caught[0].message))
    environment.tell(EVIL)
    with shown_progress() as progress:
        progress(EVIL, 0.5)
    written = capsys.readouterr()
    assert r"\x1b" in written.err
    _is_clean(written.err)
    assert written.out == ""


class Evil(nn.Module):
    """Its children and its class have hostile names, as code of others may."""

    def __init__(self) -> None:
        super().__init__()
        self.names = [f"{EVIL.replace('.', '')}{i}" for i in range(2)]
        for name in self.names:
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x).relu()
        return x.sum()


def test_estimates_comparisons_and_verifications_of_hostile_modules_are_clean() -> None:
    kind = type(f"Evil{EVIL}".replace("\0", ""), (Evil,), {})
    estimate = planner.estimate(kind(), (torch.ones(4, 8),))
    _is_clean(str(estimate))
    assert r"\x1b" in str(estimate)
    way = Way(**dict.fromkeys(Way.__dataclass_fields__) | {"name": EVIL, "note": EVIL})  # type: ignore[arg-type]
    _is_clean(str(Comparison(budget=EVIL, budget_bytes=None, ways=[way])))
    report = Report(True, True, True, True, True, 1, 1, 1, 1, 1, None, 1.0, 1.0, problems=[EVIL])
    _is_clean(as_text(render_verification(report)))
    _is_clean(repr(report))


def test_all_output_goes_through_what_makes_names_visible() -> None:
    """Text reaches a terminal in few places, each of which makes names visible."""
    found: dict[str, set[str]] = {}
    pattern = re.compile(r"typer\.echo\(|\bConsole\(|sys\.stderr\.write\(|sys\.stdout\.write\(|^\s*print\(")
    for path in (ROOT / "planner").rglob("*.py"):
        for line in path.read_text().splitlines():
            if match := pattern.search(line):
                found.setdefault(str(path.relative_to(ROOT / "planner")), set()).add(match[0])
    assert found == {
        "__main__.py": {"sys.stderr.write("},
        "calibration/free_memory.py": {"print("},  # in a process whose output is read as a number
        "cli/output.py": {"typer.echo(", "Console("},
        "cli/progress.py": {"Console(", "sys.stderr.write("},
        "environment.py": {"sys.stderr.write("},
        "report/text.py": {"Console("},
    }


def test_a_text_is_made_visible_and_stays_otherwise() -> None:
    assert printable("encoder.layer.0 é 漢字 ▁█") == "encoder.layer.0 é 漢字 ▁█"
    assert printable("\x1b\r\n\u202e\ud800\x7f\xa0") == r"\x1b\r\n\u202e\ud800\x7f\xa0"
    assert printable("a\nb\t", keep="\n") == "a\nb\\t"
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert printable(every).isprintable()
