"""Options, models, JSON and tables of the benchmark commands."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, available_cores, describe
from benchmarks.processes import Side, run
from benchmarks.shapes import SHAPES, WORKLOADS, Workload

FOLDER = ROOT / "benchmarks"
PEER = FOLDER / ".peer" / "bin" / "python"
# Options that say where something lies; results do not record them.
PLACES = ("out", "lock", "peer_python", "models")


@dataclass(frozen=True)
class Setting:
    """The options of one command, as every benchmark reads them."""

    name: str
    options: argparse.Namespace

    @property
    def shape_name(self) -> str:
        """Key into `SHAPES`, or "" for a benchmark that has a shape of its own."""
        given = getattr(self.options, "shape", "")
        return "tiny" if given and self.options.quick else given

    @property
    def shape(self) -> dict[str, Any]:
        """Config fields of the model."""
        return SHAPES[self.shape_name]

    @property
    def device(self) -> str:
        """Where it runs: cpu or cuda."""
        return str(self.options.device)

    @property
    def workload(self) -> Workload:
        """The PPO iteration that is measured."""
        return WORKLOADS["quick" if self.options.quick else self.device]

    @property
    def out(self) -> Path:
        """Where the JSON goes."""
        name = "_".join(filter(None, (self.name, self.shape_name, self.device)))
        return Path(self.options.out or FOLDER / "results" / f"{name}.json")

    @property
    def lock(self) -> Path | None:
        """File that is held while a process is measured."""
        return Path(self.options.lock) if self.options.lock else None

    def task(self, **fields: Any) -> dict[str, Any]:
        """Return a worker's task: the common fields and `fields`."""
        return {"device": self.device, "threads": self.options.threads, **fields}

    def command(self) -> str:
        """Return the command line, without the options that name places on this machine."""
        words = ["python", "-m", f"benchmarks.{self.name}"]
        for name, value in vars(self.options).items():
            if name in PLACES or value is None or value is False or value == []:  # 0 is a value
                continue
            words.append(f"--{name.replace('_', '-')}")
            if isinstance(value, Path):
                words.append(value.name)
            elif value is not True:
                words += map(str, value if isinstance(value, list) else [value])
        return " ".join(words)


def parser(
    description: str, *, repeats: int = 3, shape: str | None = "135m"
) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has; no --shape if `shape` is None."""
    made = argparse.ArgumentParser(description=description)
    if shape is not None:
        made.add_argument("--shape", choices=sorted(SHAPES), default=shape, help="of the model")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--threads", type=int, default=available_cores(), help="of every process")
    made.add_argument("--repeats", type=int, default=repeats, help="processes a side, in turn")
    made.add_argument("--quick", action="store_true", help="a tiny model: does it run at all?")
    made.add_argument("--out", help="JSON file; default benchmarks/results/<name>_<shape>_<device>")
    made.add_argument("--lock", help="file to hold while a process is measured")
    made.add_argument("--models", help="folder for the models; default a temporary one")
    return made


def add_peer(made: argparse.ArgumentParser, default: str, what: str) -> None:
    """Add the option that names the peer's interpreter."""
    made.add_argument("--peer-python", default=default, help=f"interpreter with {what}")


def add_overrides(made: argparse.ArgumentParser) -> None:
    """Add the option that changes this project's configuration."""
    made.add_argument(
        "--overrides",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="of this project's configuration, such as rollout=transformers; default its defaults",
    )


def peer_python(options: argparse.Namespace) -> str:
    """Return the peer's interpreter.

    Raises:
        SystemExit: if there is none.
    """
    if not Path(options.peer_python).exists():
        raise SystemExit(
            f"no interpreter {options.peer_python}: make the peer's environment with "
            "benchmarks/peer_env.sh, or measure this project alone with --only ours"
        )
    return str(options.peer_python)


@contextmanager
def models(setting: Setting) -> Iterator[Path]:
    """Yield a folder with the models of the setting's shape; write them if they are not there."""
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(setting.options.models or temporary).resolve()
        folder = base / setting.shape_name
        if not (folder / "tokenizer").exists():
            folder.mkdir(parents=True, exist_ok=True)
            task = setting.task(folder=str(folder), shape=setting.shape)
            run(Side("models", "models", task), lock=setting.lock)
        yield folder


def finish(
    setting: Setting,
    runs: dict[str, list[dict[str, Any]]],
    summary: dict[str, Any],
    render: Callable[[dict[str, Any]], str],
    *,
    pythons: dict[str, str] | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the result as JSON, print its table, and return it."""
    result = {
        "benchmark": setting.name,
        "command": setting.command(),
        "shape": setting.shape_name,
        "machine": describe(
            setting.device, setting.options.threads, {"ours": sys.executable, **(pythons or {})}
        ),
        "settings": settings or {},
        "summary": summary,
        "runs": runs,
    }
    setting.out.parent.mkdir(parents=True, exist_ok=True)
    setting.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(render(result) + "\n")
    return result


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gib(count: float) -> str:
    """Return bytes as GiB with two decimals."""
    return f"{count / 2**30:.2f} GiB"
