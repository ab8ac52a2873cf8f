"""The notebooks run top to bottom, and are kept without what a run put into them."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.pairs import RECITER

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 600  # a cell that takes longer hangs
MODELS = [f'"{RECITER / name}"' for name in ("target", "draft")]  # with fewer layers than the embedded pair to compile
SMALLER = {  # what a test changes: every cell runs, on fewer tokens and with fewer and smaller programs
    "1_first_generation": {
        "LLM(num": f"LLM({', '.join(MODELS)}, num",
        "LLM()": f"LLM({', '.join(MODELS)})",
        "max_tokens=128": "max_tokens=32",
        '"max_tokens": 128': '"max_tokens": 32',
        "in prompts]": "in prompts[:2]]",
    },
    "2_train_a_drafter": {
        'EMBEDDED / "target"': f"Path({MODELS[0]})",
        "--target-layer-ids 3 7 11 13": "--target-layer-ids 0 1",
        "NUM_PROMPTS, LINES = 20, 3": "NUM_PROMPTS, LINES = 8, 3",
        "--max-num-seqs 4": "--max-num-seqs 1",
        "--epochs 60": "--epochs 8",
        "--eval-samples 4 --eval-max-tokens 32": "--eval-samples 2 --eval-max-tokens 16",
    },
    "3_roofline_of_a_round": {
        "LLM(num": f"LLM({', '.join(MODELS)}, num",
        "BATCHES = (1, 16)": "BATCHES = (1, 2)",
    },
}


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
        for start in ("| | batch 1 ", "| Qwen3-8B, plain decoding")
    )
    batches = [int(cell.replace("batch", "")) for cell in header]
    cells = {batch: re.findall(r"[\d.]+", cell) for batch, cell in zip(batches, row, strict=True) if cell.strip()}
    notebook = NOTEBOOKS[2].read_text()
    for column, engine in enumerate(("this engine", "vLLM")):
        drawn = re.search(rf'\\"{engine}, plain\\": \(\{{(.*?)\}}', notebook)
        figures = dict(part.split(": ") for part in drawn[1].split(", "))
        shown = {str(batch): numbers[column] for batch, numbers in cells.items()}
        assert {batch: figures[batch] for batch in shown} == shown


def make_smaller(notebook, changes):
    for old, new in changes.items():
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
        assert cells, f"no cell has {old!r}"
        for cell in cells:
            cell.source = cell.source.replace(old, new)


@pytest.mark.parametrize("size", ["smaller", pytest.param("as shipped", marks=pytest.mark.long)])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_top_to_bottom(path, size, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    if size == "smaller":
        make_smaller(notebook, SMALLER[path.stem])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", resources=resources).execute()
    assert not any(tmp_path.iterdir())  # they leave nothing behind where they are started
