"""The commands themselves, with settings that name a place, in places that a user has filled."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_lightning.preferences.annotation.store import LabelStore
from rlhf_lightning.runs.manifest import publish_artifact
from tests.builders.command_lines import environment, overrides_of
from tests.builders.labels import make_pairs
from tests.builders.processes import ForkedPython
from tests.builders.runs import completed, killed
from tests.entry.test_files_of_a_user import NAMES, files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MINE = "mine\n"
RUN = "outputs/sft/a"
OWN = "outputs/sft/k"  # the folder of a run that can be continued
PLACES = ["mine", "link", "file/new", ".", RUN, f"{RUN}/export", OWN, "published", "webapp"]
PLACES += ["dangling"]
FILES = ["mine/report.html", "page.html", "dangling", "store.sqlite", f"{RUN}/metrics.csv"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Path:
    """A folder with runs, a model, a store, and files of a user under all names of ours."""
    root = tmp_path_factory.mktemp("world")
    shutil.copytree(start, root / "start")
    run = completed(root / "outputs/sft/a", "sft", start)
    killed(root / "outputs/sft/k", "sft", start)
    publish_artifact(run.export, root / "published", stage="sft", run=str(run.path))
    for place in ("mine", "mine/sft", "published"):
        for name in NAMES:
            path = root / place / name
            if not path.exists() and not any(above.is_file() for above in path.parents):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(MINE)
    for name, content in {
        "webapp/manifest.json": '{"name": "my application"}',
        "webapp/model.safetensors": "mine",
        "file": "mine",
        "page.html": "<!doctype html>\nmine",
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)
    (root / "link").symlink_to("mine")
    (root / "dangling").symlink_to("nowhere")
    rows = ({"prompt": p.prompt, "chosen": "a", "rejected": "b"} for p in make_pairs(3))
    (root / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with LabelStore(root / "store.sqlite") as store:
        store.add_pairs(make_pairs(3), labels_per_pair=1)
    return root


def command_lines(start: Path) -> Iterator[tuple[str, ...]]:
    sft = overrides_of("sft", start)
    for place in PLACES:
        yield ("export", RUN, f"to={place}")
        if place != OWN:
            yield (
                "train",
                *sft,
                f"hydra.run.dir={place}",
                f"ckpt_path={OWN}/checkpoints/last.ckpt",
            )
        yield ("train", *sft, f"artifacts.publish={place}", "hydra.run.dir=new")
        yield ("train", "-m", *sft, f"hydra.sweep.dir={place}", "seed=0.5,1.5")
    yield ("train", *sft, "hydra.run.dir=mine")
    for command in ("evaluate", "collect", "pipeline"):
        yield (command, "hydra.run.dir=mine")
    for file in FILES:
        yield ("annotate", "action=import", "file=pairs.jsonl", f"store={file}")
        yield ("annotate", "action=export", "store=store.sqlite", "format=trl", f"file={file}")
        yield ("report", RUN, OWN, f"output={file}")


def of_the_command(words: tuple[str, ...], path: str, content: str) -> bool:
    """Return whether a command is there to write a file: its own store, page or publication."""
    if words[0] == "annotate":
        return "store=store.sqlite" in words and path.startswith("store.sqlite")
    if words[0] == "report":
        return path.startswith("outputs/sft/") and path.endswith("report.html")
    ours = path.startswith("published/") and content != hashlib.sha256(MINE.encode()).hexdigest()
    return "artifacts.publish=published" in words and ours


def test_no_command_loses_or_changes_a_file(world, start, tmp_path):
    shutil.copytree(world, tmp_path / "world", symlinks=True)
    root, found = tmp_path / "world", []
    for number, words in enumerate(command_lines(start)):
        before = files(root)
        arguments = ["-m", f"rlhf_lightning.{words[0]}", *words[1:]]
        process = ForkedPython(arguments, root, environment(), tmp_path / f"{number}.log")
        process.wait(240)
        after = files(root)
        lost = [
            p
            for p in before
            if after.get(p) != before[p] and not of_the_command(words, p, before[p][0])
        ]
        if lost:
            found.append((words, lost))
        if "Traceback" in (tmp_path / f"{number}.log").read_text():
            found.append((words, ["a traceback"]))
        for made in {*after} - {*before}:
            (root / made).unlink()
        shutil.rmtree(root / "new", ignore_errors=True)
    assert found == []
