"""Run the notebooks and write each .ipynb from its text: `python notebooks/build.py [NAME ...]`.

The text (`.py`, jupytext's percent format) is what is edited; the .ipynb holds the same cells
and what they printed and drew.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def texts() -> list[Path]:
    """Return the notebooks' texts, in reading order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def copy_texts(folder: Path) -> None:
    """Copy what a notebook imports, and the texts themselves."""
    for file in FOLDER.glob("*.py"):
        shutil.copy(file, folder)


def notebook_of(text: Path) -> NotebookNode:
    """Return the cells of a text, without outputs; ids by position, so that diffs stay small."""
    notebook = jupytext.read(text)
    notebook.metadata = NotebookNode({"kernelspec": NotebookNode(KERNEL)})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = NotebookNode({})
    return notebook


def execute(notebook: NotebookNode, folder: Path, *, timeout: int = 1800) -> NotebookNode:
    """Run every cell in a kernel that starts in `folder`, and return the notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell raises.
    """
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources=resources,
        extra_arguments=["--log-level=ERROR"],
    ).execute()
    for cell in notebook.cells:
        cell.metadata = NotebookNode({})
        if "outputs" in cell:  # what libraries say on stderr differs from machine to machine
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            if "data" in output and "image/png" in output.data:
                output.data.pop("text/plain", None)
            output.pop("metadata", None)
            if output.output_type in ("display_data", "execute_result"):
                output.metadata = NotebookNode({})
    notebook.metadata = NotebookNode({"kernelspec": NotebookNode(KERNEL)})
    return notebook


def main(names: list[str]) -> None:
    """Run and write all notebooks, or those whose name starts with one of `names`."""
    for text in texts():
        if names and not text.stem.startswith(tuple(names)):
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:  # what they train is not kept
            copy_texts(Path(folder))
            notebook = execute(notebook_of(text), Path(folder))
        target = text.with_suffix(".ipynb")
        nbformat.write(notebook, target)
        seconds = time.perf_counter() - started
        print(f"{target.name}: {seconds:.0f} s, {target.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
