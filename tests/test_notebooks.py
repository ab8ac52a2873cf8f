"""The notebooks run top to bottom with the embedded pair, and are kept without what a run put into them."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 600  # a cell that takes longer hangs


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_holds_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), f"{path.name}: clear all outputs"
        assert cell.get("execution_count") is None


def test_measured_figures_are_those_of_the_readme():
    readme = (NOTEBOOKS[0].parents[1] / "README.md").read_text()
    header, row = (
        next(line for line in readme.splitlines() if line.startswith(start)).split("|")[2:-1]
        for start in ("| milliseconds a step", "| plain decoding, context 1,024")
    )
    batches = [int(cell.replace("batch", "")) for cell in header]
    cells = {batch: re.findall(r"[\d.]+", cell) for batch, cell in zip(batches, row, strict=True) if cell.strip()}
    notebook = NOTEBOOKS[2].read_text()
    for column, engine in enumerate(("this engine", "vLLM")):
        drawn = re.search(rf'\\"{engine}, plain\\": \(\{{(.*?)\}}', notebook)
        figures = dict(part.split(": ") for part in drawn[1].split(", "))
        shown = {str(batch): numbers[column] for batch, numbers in cells.items()}
        assert {batch: figures[batch] for batch in shown} == shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_top_to_bottom(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", resources=resources).execute()
    assert not any(tmp_path.iterdir())  # they leave nothing behind where they are started
