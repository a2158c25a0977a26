"""Fill the tables of benchmarks/README.md from the JSON in benchmarks/results.

    python -m benchmarks.tables            write them
    python -m benchmarks.tables --check    fail if they are not what the JSON says

A table stands between `<!-- table NAME -->` and `<!-- end -->`; NAME is the JSON file's. Where
there is no such file the table says so. `gpu_NAME.json` comes from CUDA alone
(`benchmarks/gpu_day.sh` makes it).
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.command import FOLDER

DOCUMENTS, RESULTS = (FOLDER / "README.md",), FOLDER / "results"
MISSING, NOT_ON_CUDA, ON_CUDA = "not yet measured", "not run on CUDA", "gpu_"
_TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> None:
    """Write the tables, or check them."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--check", action="store_true", help="write nothing, fail if they differ")
    made.add_argument("--documents", nargs="+", type=Path, default=list(DOCUMENTS))
    made.add_argument("--results", type=Path, default=RESULTS)
    options = made.parse_args(arguments)
    texts = {path: path.read_text(encoding="utf-8") for path in options.documents}
    places = {match[1] for text in texts.values() for match in _TABLE.findall(text)}
    unknown = {path.stem for path in options.results.glob("*.json")} - places
    if unknown:
        raise SystemExit(f"no table for {sorted(unknown)}: add <!-- table NAME --> to a document")
    for path, before in texts.items():
        after = filled(before, options.results)
        if not options.check:
            path.write_text(after, encoding="utf-8")
        elif after != before:
            raise SystemExit(f"{path.name} differs: run python -m benchmarks.tables")


def filled(text: str, results: Path) -> str:
    """Return `text` with every table made anew from the JSON in `results`."""
    return _TABLE.sub(lambda m: f"{m[1]}{section(results / f'{m[2]}.json')}\n{m[3]}", text)


def section(path: Path) -> str:
    """Return a result's table with its command and machine, or that there is none.

    Raises:
        ValueError: if what is to be a result of CUDA is of a machine without it.
    """
    of_cuda = path.stem.startswith(ON_CUDA)
    if not path.exists():
        return NOT_ON_CUDA if of_cuda else MISSING
    result = json.loads(path.read_text(encoding="utf-8"))
    if of_cuda and "gpu" not in result["machine"]:
        raise ValueError(
            f"{path.name} was not measured on CUDA: remove it from {path.parent.name}/"
        )
    render = importlib.import_module(f"benchmarks.{result['benchmark']}").render
    return f"`{result['command']}`\n\n{render(result)}\n\n{machine_line(result['machine'])}"


def machine_line(machine: dict[str, Any]) -> str:
    """Return one line on what was measured where and when."""
    versions = "; ".join(
        f"{name}: " + ", ".join(f"{p} {v}" for p, v in found.items() if p in SHOWN)
        for name, found in machine["versions"].items()
    )
    gpu = f"{machine['gpu']['name']}, " if "gpu" in machine else ""
    flags = " ".join(machine["flags"])
    commit = machine["git_commit"] + (" with changes" if machine["uncommitted_changes"] else "")
    return (
        f"*{gpu}{machine['cpu']} ({flags}), {machine['threads']} of {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; {versions}; {machine['date']}, commit {commit}*"
    )


SHOWN = ("python", "torch", "transformers", "lightning", "trl")

if __name__ == "__main__":
    main(sys.argv[1:])
