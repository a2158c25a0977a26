"""The notebooks run, and each .ipynb holds the cells of its text."""

from __future__ import annotations

import base64
from pathlib import Path

import nbformat
import pytest

from notebooks.build import FOLDER, copy_texts, execute, notebook_of, texts

TEXTS = texts()
CHEAPEST = "01_masks"
LARGEST = 400 * 1024


def named(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("text", TEXTS, ids=named)
def test_a_notebook_holds_the_cells_of_its_text_and_what_they_showed(text):
    written = nbformat.read(text.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(written)
    cells = [(cell.cell_type, cell.source) for cell in written.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in notebook_of(text).cells], (
        f"{text.name} was changed: run `python notebooks/build.py {text.stem}`"
    )
    code = [cell for cell in written.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    images = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    assert len(images) >= 4, "plots, not prose"
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)


@pytest.mark.parametrize("text", TEXTS, ids=named)
def test_a_notebook_is_small_and_names_no_folder_of_the_machine_that_ran_it(text):
    written = text.with_suffix(".ipynb")
    assert written.stat().st_size < LARGEST
    for place in (str(Path.home()), str(FOLDER.parent), "site-packages"):
        assert place not in written.read_text(encoding="utf-8")


def run(text: Path, folder: Path) -> None:
    copy_texts(folder)
    execute(notebook_of(text), folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_cheapest_notebook_runs(tmp_path):
    run(FOLDER / f"{CHEAPEST}.py", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("text", [t for t in TEXTS if t.stem != CHEAPEST], ids=named)
def test_every_other_notebook_runs(text, tmp_path):
    run(text, tmp_path)
