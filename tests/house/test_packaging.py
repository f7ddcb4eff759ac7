"""What people get who have no checkout, and those whose machine has another Python."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from planner._torch import compat

ROOT = Path(__file__).parents[2]


def _hook() -> ModuleType:
    """The build's hook; what it derives from is only there while a package is built."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("hatch_metadata", ROOT / "hatch_metadata.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
        for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
            patch.setitem(sys.modules, name, ModuleType(name))
        spec.loader.exec_module(module)
    return module


hook = _hook()
ADDRESS = "https://github.com/some/where"


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/some/where.git", ADDRESS),
        ("https://user:secret@github.com/some/where", ADDRESS),
        ("git@github.com:some/where.git", ADDRESS),
        ("ssh://git@github.com:22/some/where.git", ADDRESS),
        ("https://gitlab.com/some/deep/where/", "https://gitlab.com/some/deep/where"),
        ("https://git.inside.example/some/where.git", None),
        ("/home/someone/where", None),
        ("../github.com/some/where", None),
        ("", None),
    ],
)
def test_only_public_repositories_are_named_without_passwords(remote: str, address: str | None) -> None:
    assert hook.web_address(remote) == address


def test_the_repository_is_where_the_checkout_came_from(tmp_path: Path) -> None:
    assert hook.public_repository(tmp_path / "missing") is None
    for command in (["init", "-q"], ["remote", "add", "origin", "git@github.com:some/where.git"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    assert hook.public_repository(tmp_path) == ADDRESS
    information = "Name: x\n" + "".join(f"Project-URL: {k}, {v}\n" for k, v in hook.urls(ADDRESS).items())
    assert hook.packaged_repository(information) == ADDRESS
    assert hook.packaged_repository("Name: x\n") is None


def test_no_link_of_the_readme_is_dead_on_a_package_index() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.search(r"\]\(docs/", text)
    for address in (ADDRESS, None):
        shown = hook.with_addresses(text, address)
        targets = re.findall(r"\]\(([^)]+)\)", shown)
        assert targets
        assert all(target.startswith("https://") for target in targets)
        for target in targets:
            if target.startswith(ADDRESS):
                path = re.sub(r"^.*/(?:blob|raw)/HEAD/|#.*$", "", target)
                assert (ROOT / path).exists(), target
    assert f"![Live bytes]({ADDRESS}/raw/HEAD/a.svg)" == hook.with_addresses("![Live bytes](a.svg)", ADDRESS)
    assert hook.with_addresses("[Design](docs/design.md#x)", None) == "Design (`docs/design.md`)"


def test_the_package_names_addresses_and_the_readme_how_to_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"urls", "readme"} <= set(project["dynamic"])
    readme = (ROOT / "README.md").read_text()
    assert "## Installation" in readme
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in readme
    torch = next(name for name in project["dependencies"] if name.startswith("torch>="))
    oldest = torch.removeprefix("torch>=")
    assert f"PyTorch {oldest} or newer" in readme
    assert f"2.{compat.OLDEST[1]} to 2.{compat.NEWEST[1]}" in readme
    extras = set(re.findall(r"\.\[([a-z]+)\]", readme))
    assert {"plot", "dev"} <= extras <= set(project["optional-dependencies"])


BUILD = """
import torch

def build():
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4)]
    return torch.nn.Sequential(*layers), (torch.randn(512, 32),)
"""


OTHERS = """
import json, sys
from typer.testing import CliRunner
from planner.cli.commands import app

done = [CliRunner().invoke(app, command.split()) for command in sys.argv[1:]]
print(json.dumps([(each.exit_code, each.output) for each in done]))
"""
"""Several commands in one process, which imports PyTorch once."""


@pytest.mark.heavy
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the lowest versions were not built for this Python")
def test_the_lowest_versions_that_are_allowed_will_do(tmp_path: Path) -> None:
    """All but PyTorch's, which is tried by ``make compat``; pip gets them from its index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = dict(
        re.fullmatch(r"(\w+)>=([\d.]+),<\d+", each).groups() for each in project["dependencies"][1:]
    )
    assert {"pulp", "highspy", "typer"} <= set(lowest)
    (tmp_path / "train.py").write_text(BUILD)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'lowest'}{os.pathsep}{ROOT}"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pins = [f"{name}=={version}" for name, version in lowest.items()]
    run("-m", "pip", "install", "--quiet", "--target", "lowest", *pins)
    versions = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"
    found = zip(run("-c", versions, *lowest).split(), lowest.values(), strict=True)
    assert all(re.fullmatch(rf"{re.escape(version)}(\.0)*", there) for there, version in found)
    run("-m", "planner", "plan", "train.py:build", "--budget", "80%", "-o", "plan.json")
    found = json.loads(run("-c", OTHERS, "show plan.json", "verify train.py:build plan.json", "plan --help"))
    assert [code for code, _ in found] == [0, 0, 0], found
    assert "planned" in found[0][1]
    assert "--budget" in found[2][1]


# ---- make ----------------------------------------------------------------------------------------------

PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit {status}
echo "$0 $*" >> "{log}"
[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
exit 0
"""


def _make(folder: Path, pythons: dict[str, int], *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run make where only these Pythons are, with what each says when asked whether it will do."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("sh", "make", "touch", "mkdir", "cp"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    for name, status in pythons.items():
        (programs / name).write_text(PYTHON.format(status=status, log=folder / "log"))
        (programs / name).chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV", "MAKEFLAGS")}
    return subprocess.run(
        ["make", "-C", str(ROOT), f"VENV={folder / 'venv'}", *arguments],
        env={**environment, "PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3.11": 0, "python3.12": 0}, "python3.11"),
        ({"python3.11": 127, "python3.12": 0, "python3": 0}, "python3.12"),
        ({"python3.13": 0}, "python3.13"),
        ({"python3.12": 1, "python3": 0}, "python3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_make_takes_the_python_that_is_there(tmp_path: Path, pythons: dict[str, int], taken: str) -> None:
    done = _make(tmp_path, pythons, "venv")
    assert done.returncode == 0, done.stderr
    first, second, *_ = (tmp_path / "log").read_text().splitlines()
    assert first == f"{tmp_path}/programs/{taken} -m venv {tmp_path}/venv"
    assert second.startswith(f"{tmp_path}/venv/bin/python -m pip install")


def test_make_says_what_to_install_where_no_python_will_do(tmp_path: Path) -> None:
    done = _make(tmp_path, {"python3": 1}, "test")
    assert done.returncode != 0
    for words in ("no Python 3.11 or newer", "apt install", "brew install", "make PYTHON="):
        assert words in done.stderr
    assert not (tmp_path / "venv").exists()
