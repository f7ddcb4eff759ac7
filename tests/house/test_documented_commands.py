"""Every block of README, tutorial and guides runs: Python in test_guides.py, commands here."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from planner.cli.commands import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    DOCS / "index.md",
    DOCS / "installation.md",
    DOCS / "tutorial.md",
    DOCS / "coming-from.md",
    DOCS / "troubleshooting.md",
    *sorted((DOCS / "guides").glob("*.md")),
]
NOT_OURS = {
    "pip install .": "test_packaging.py installs the package",
    "make demo": "test_examples.py runs the program",
    "make test": "these",
}
QUICKLY = {
    "plan": ["--solver", "sqrt_n"],
    "max-batch": ["--solver", "sqrt_n", "--most", "8"],
    "sweep": ["--time-limit", "0.3"],
    "compare": ["--solver", "sqrt_n"],
}
"""What is added to commands so that they search less: no option of their own is taken from them."""

OUTPUT = "BertForMaskedLM: 6 layers"
"""How what a command prints begins."""


def _unfenced(path: Path) -> list[str]:
    """The blocks of a page that are set off by spaces, whole."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"(?:^    \S.*\n|^     .*\n)+", text, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]


def _commands(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [" ".join(line.partition(" #")[0].split()) for line in lines]


def _blocks() -> list[tuple[str, list[str]]]:
    found = ((path.name, block) for path in PAGES for block in _unfenced(path))
    return [(name, _commands(block)) for name, block in found if not block.startswith(OUTPUT)]


def test_no_block_escapes() -> None:
    """What is neither Python between fences nor commands would be run by nobody."""
    for path in PAGES:
        kinds = re.findall(r"^```(.*)\n", path.read_text(), re.MULTILINE)[::2]
        assert set(kinds) <= {"python"}, path.name
    commands = {command for _, block in _blocks() for command in block}
    assert len(commands) > 15
    other = {command for command in commands if not command.startswith("python -m planner ")}
    assert other == NOT_OURS.keys()
    text = "".join(path.read_text() for path in PAGES)
    assert sum(len(_unfenced(path)) for path in PAGES) - len(_blocks()) == text.count(OUTPUT) == 1


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the example of the commands, smaller, and a `train.py` of the reader's."""
    text = (ROOT / "examples" / "bert.py").read_text()
    for old, new in (
        (
            "LAYERS, WIDTH, HEADS, VOCABULARY = 6, 256, 4, 4096",
            "LAYERS, WIDTH, HEADS, VOCABULARY = 2, 16, 2, 64",
        ),
        ("BATCH, LENGTH = 8, 256", "BATCH, LENGTH = 2, 16"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "examples").mkdir()
    for name in ("examples/bert.py", "train.py"):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_commands_of_the_documentation_run(checkout: Path) -> None:
    done: dict[str, str] = {}
    known = get_command(app).commands  # type: ignore[attr-defined]
    for page, block in _blocks():
        for command in block:
            if command in NOT_OURS or command in done:
                continue
            words = shlex.split(command.removeprefix("python -m planner ").replace("layer.3", "layer.1"))
            if words[0] == "diff":
                shutil.copy("plan.json", "other.json")
            if words[0] == "replay":
                shutil.copy("predicted.pickle", "recorded.pickle")
            # Every option is one of the command's; test_compare.py measures, which takes long.
            if words[0] in known:
                known[words[0]].make_context(words[0], words[1:])
            words = [word for word in words if word != "--measure"]
            result = CliRunner().invoke(app, [*words, *QUICKLY.get(words[0], [])])
            no_gpu = words[0] == "calibrate" and not torch.cuda.is_available()
            assert result.exit_code == (2 if no_gpu else 0), f"{page}: {command}: {result.output}"
            done[command] = result.output
    written = {"plan.json", "plan.svg", "report.html", "frontier.svg", "predicted.pickle"}
    assert written <= {path.name for path in checkout.iterdir()}
