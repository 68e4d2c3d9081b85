"""Notebooks: each runs from top to bottom, is short, and was committed with its outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # of the kernel's own machinery
def test_a_notebook_runs_and_shows_what_it_found(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(notebook.cells) < 30
    assert any(cell.outputs for cell in code), "commit it with its outputs"
    where = {"metadata": {"path": tmp_path}}  # what it writes is not left in the clone
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
