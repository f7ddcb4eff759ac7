"""The command line as a process: its streams, Ctrl-C, and whose code it imports."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from planner.cli import own_packages
from planner.cli.own_packages import ShadowedError, check_solvers
from planner.cli.process import plain
from tests.plans import layered_plan

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "planner")

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    def forward(self, x):
        print("forward", flush=True)
        return self.layers(x).square().mean()

def build():
    return Net(), (torch.randn(64, 8),)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a plan and a model."""
    layered_plan().save(tmp_path / "plan.json")
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def _shell(script: str, cwd: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of a shell in which $planner is the command."""
    environment = _environment(planner=" ".join(COMMAND), **more)
    return subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )


# ---- streams -------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_an_ascii_terminal_gets_plain_characters(folder: Path) -> None:
    done = _shell("$planner show plan.json", folder, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "# planned  . unplanned  - budget" in done.stdout
    assert "?" not in done.stdout


def test_what_has_no_plain_character_is_a_question_mark() -> None:
    text = "█▂ ┤ \N{SNOWMAN}…"
    with pytest.raises(UnicodeEncodeError) as caught:
        text.encode("ascii")
    assert plain(caught.value) == ("#_", 2)
    for name in ("ascii", "cp1252", "latin-1"):
        assert "".join(c if _has(name, c) else plain(_error(name, c))[0] for c in text).encode(name)


def _has(name: str, character: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        return bool(character.encode(name))
    return False


def _error(name: str, character: str) -> UnicodeEncodeError:
    return UnicodeEncodeError(name, character, 0, 1, "")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("$planner show plan.json >&-", 0),
        ("$planner show plan.json 2>&-", 0),
        ("$planner show missing.json >&- 2>&- <&-", 2),
    ],
)
def test_closed_streams_change_nothing(folder: Path, script: str, code: int) -> None:
    done = _shell(script, folder)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("zoo.GPT" in done.stdout) == ("2>&-" in script and code == 0)


@pytest.mark.heavy
def test_a_reader_that_stops_early_changes_no_exit_code(folder: Path) -> None:
    done = _shell("$planner schema | head -c 10; echo ${PIPESTATUS[0]}", folder)
    assert done.stdout.endswith("0\n")
    assert done.stderr == ""
    gone = _shell("($planner show missing.json; echo $? > code) 2>&1 | true; cat code", folder)
    assert gone.stdout == "2\n"


@pytest.mark.heavy
def test_a_result_that_cannot_be_written_is_an_error(folder: Path) -> None:
    done = _shell("$planner show plan.json > /dev/full", folder)
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*No space left on device.*\n", done.stderr)


@pytest.mark.heavy
@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_of_any_width_shows_whole_labels(folder: Path, columns: int) -> None:
    text, code = _on_a_terminal(columns, folder, "show", "plan.json")
    assert code == 0
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    labels = {
        line.split("  ")[0].strip() if line[:1] != " " else line.strip().split("  ")[0] for line in lines
    }
    assert {"peak", "of the step", "resident", "time", "(the model)", "attention x4", "(itself)"} <= labels
    assert any(line.rstrip().endswith("extra time") for line in lines)


def _on_a_terminal(columns: int, cwd: Path, *arguments: str) -> tuple[str, int]:
    """What a command prints on a terminal, without colours, and its exit code."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {k: v for k, v in _environment(TERM="xterm").items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=cwd, env=environment, stdin=its, stdout=its, stderr=its
    )
    os.close(its)
    pieces = []
    with contextlib.suppress(OSError):  # of a terminal that nobody has open any more
        while piece := os.read(ours, 1 << 16):
            pieces.append(piece)
    os.close(ours)
    text = b"".join(pieces).decode().replace("\r\n", "\n")
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text), process.wait()


def test_the_end_runs_what_was_registered_for_it_and_it_is_no_result(tmp_path: Path) -> None:
    script = (
        "import atexit, sys, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from planner.cli import process\n"
        "pool = ThreadPoolExecutor(1)\n"  # its idle worker ends when it is told to
        "pool.submit(abs, 1).result()\n"
        "atexit.register(print, 'registered')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "process.run(lambda: print('result') or sys.exit(3))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "result\n", "thread\nregistered\n")


# ---- Ctrl-C --------------------------------------------------------------------------------------------


def _interrupted_at(moment: str, cwd: Path) -> tuple[str, int]:
    """Plan, press Ctrl-C when a line starts with `moment`, and return what stderr says after it."""
    process = subprocess.Popen(
        [*COMMAND, "plan", "net:build", "-b", "60%", "-o", "made.json"],
        cwd=cwd,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(moment):
            break
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=80)[1], process.returncode


@pytest.mark.heavy
@pytest.mark.parametrize("moment", ["importing", pytest.param("forward", marks=pytest.mark.heavy)])
def test_ctrl_c_ends_the_command_with_130_and_one_line(folder: Path, moment: str) -> None:
    before = sorted(os.listdir(folder))
    said, code = _interrupted_at(moment, folder)
    assert code == 130, said
    progress = re.compile(r".*\(\d+%\)|forward")
    assert [line for line in said.splitlines() if not progress.fullmatch(line)] == ["interrupted"]
    assert [name for name in sorted(os.listdir(folder)) if name != "__pycache__"] == before


# ---- whose code is imported ----------------------------------------------------------------------------


@pytest.mark.heavy
def test_folders_of_the_users_with_our_names_do_not_disturb(folder: Path) -> None:
    for name in ("solvers", "rich", "pydantic"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('of the user')\n")
    (folder / "planner").mkdir()
    done = _shell("$planner plan net:build -b 100% --solver sqrt_n", folder)
    assert done.returncode == 0, done.stderr
    assert "net.Net" in done.stdout


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["solvers", "rich"])
def test_commands_without_a_model_do_not_look_into_the_working_directory(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text("raise RuntimeError('of the user')\n")
    done = _shell("$planner show plan.json", folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_file_is_shown_without_pytorch(folder: Path) -> None:
    (folder / "torch.py").write_text("raise RuntimeError('which takes seconds')\n")
    done = _shell("$planner show plan.json", folder, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "zoo.GPT" in done.stdout


def test_another_solvers_is_named(folder: Path) -> None:
    (folder / "solvers").mkdir()
    other = folder / "solvers" / "__init__.py"
    other.write_text("")
    script = (
        "import planner\ntry:\n    planner.plan\nexcept planner.PlannerError as error:\n    print(error)\n"
    )
    environment = _environment(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"Python finds {other}: rename that" in done.stdout
    command = _shell("$planner show plan.json", folder, PYTHONPATH=environment["PYTHONPATH"])
    assert command.returncode == 2
    assert re.fullmatch(rf"error: .*Python finds {re.escape(str(other))}: rename.*\n", command.stderr)


def test_our_own_solvers_is_taken() -> None:
    check_solvers()
    assert issubclass(ShadowedError, ImportError)


@pytest.mark.parametrize("made", ["planner/mine.py", "planner.py", "solvers/mine.py"])
def test_an_import_that_we_hide_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    path = tmp_path / made
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    monkeypatch.chdir(tmp_path)
    package = made.partition("/")[0].removesuffix(".py")
    error = ModuleNotFoundError(f"No module named '{package}.mine'", name=f"{package}.mine")
    reported = own_packages.hidden_by_own(error)
    assert f"hides {tmp_path / made.partition('/')[0]}: rename" in reported
    assert own_packages.hidden_by_own(ModuleNotFoundError("", name="numpy.mine")) == ""
