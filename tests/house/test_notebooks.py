"""The notebooks run from top to bottom, and use what is public."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PUBLIC = {"planner", "planner.integrations.huggingface", "planner.integrations.lightning"}
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_what_is_public_and_is_small(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imported = set(re.findall(r"^(?:from|import) (planner[\w.]*|solvers[\w.]*)", code, re.MULTILINE))
    assert imported
    assert imported <= PUBLIC
    assert path.stat().st_size < 300 * 1024


BEFORE = """
%reset -f
import os, sys
sys.path.append({root!r})
os.chdir({folder!r})
import pytest
import planner
from tests.searches import shorten_searches
shorten_searches(pytest.MonkeyPatch())
%reset -f
"""
"""What runs before a notebook: no name of another one is there. Searches end sooner than a reader's."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One kernel for all notebooks, so that what they import is imported once."""
    nbclient: Any = pytest.importorskip("nbclient")
    kernel = nbclient.NotebookClient({}, kernel_name="python3").create_kernel_manager()
    yield kernel
    if kernel.has_kernel:
        nbclient.util.run_sync(kernel.shutdown_kernel)(now=True)


@pytest.mark.heavy
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, kernel: Any) -> None:
    nbformat: Any = pytest.importorskip("nbformat")
    nbclient: Any = pytest.importorskip("nbclient")
    pytest.importorskip("transformers")
    notebook = nbformat.read(path, as_version=4)
    before = BEFORE.format(root=str(NOTEBOOKS[0].parents[1]), folder=str(tmp_path))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
    client = nbclient.NotebookClient(notebook, km=kernel, timeout=300, kernel_name="python3")
    client.execute()
    client.kc.stop_channels()
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert pictures
