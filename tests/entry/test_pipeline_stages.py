"""A stage of a pipeline: when it counts as done, what it reads, and what a signal leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_lightning.app.pipeline import FailedRunError, advance
from rlhf_lightning.app.pipeline_steps import Step
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.stopping import stopping_on_signals
from tests.builders.command_lines import environment

pytestmark = pytest.mark.timeout(120)
# A command: it writes its summary, waits for a file `go`, and makes what it has read.
COMMAND = """
import json, pathlib, signal, sys, time
root = pathlib.Path(sys.argv[1])
folder = root / "one"
folder.mkdir(exist_ok=True)
def tell(status):
    content = {"stage": "sft", "status": status, "seed": 1, "config_hash": "x"}
    (folder / "summary.json").write_text(json.dumps(content))
def stop(*_):
    tell("stopped")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
tell("running")
while not (root / "go").exists():
    time.sleep(0.02)
if (root / "silent").exists():
    sys.exit(0)
if (root / "fails").exists():
    sys.exit(7)
(folder / "data").mkdir(exist_ok=True)
(folder / "data/rows").write_text((root / "rows.jsonl").read_text())
tell("completed")
"""


@dataclass(frozen=True)
class Fake(Step):
    """A step of that command."""

    @cached_property
    def settings(self) -> SimpleNamespace:
        named = {"data": {"path": str(self.place.parent / "rows.jsonl")}}
        return SimpleNamespace(config_hash="x", resolved=named, select=lambda key: None)

    def command_line(self) -> list[str]:
        return [sys.executable, "-c", COMMAND, str(self.place.parent)]


def fake(root: Path) -> Fake:
    return Fake(1, "one", root / "one", "train", ())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("1")
    (tmp_path / "go").touch()
    return tmp_path


def carry_out(root: Path) -> bool:
    """Run the step; return whether it was done before."""
    with stopping_on_signals():
        return advance(fake(root), RunFolder(root))


def test_a_stage_is_done_while_what_it_read_is_unchanged(root):
    assert not carry_out(root)
    assert carry_out(root)
    (root / "rows.jsonl").write_text("2")
    assert not carry_out(root)  # its input was made anew
    assert (root / "one/data/rows").read_text() == "2"
    assert (root / "one_before_1/data/rows").read_text() == "1"
    (root / "one/data/rows").write_text("3")  # what it made: a stage that reads it runs again
    assert carry_out(root)


@pytest.mark.parametrize(("end", "code"), [("silent", 0), ("fails", 7)])
def test_a_stage_that_ends_without_a_result_has_failed_and_runs_again(root, end, code):
    (root / end).touch()
    with pytest.raises(FailedRunError, match=f"ended with status {code}") as error:
        carry_out(root)
    assert error.value.code == 1
    (root / end).unlink()
    assert not carry_out(root)
    assert not list(root.glob("one_before_*"))  # it was continued


PARENT = """
import sys
from pathlib import Path
from tests.entry.test_pipeline_stages import carry_out
carry_out(Path(sys.argv[1]))
"""


@pytest.mark.thorough
def test_a_hang_up_ends_the_stage_too(root):
    (root / "go").unlink()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(root)], env=environment(), stderr=subprocess.DEVNULL
    )
    begun = time.monotonic()
    while not (root / "one/summary.json").exists():
        assert time.monotonic() < begun + 60
        time.sleep(0.02)
    parent.send_signal(signal.SIGHUP)
    parent.wait(timeout=60)
    assert json.loads((root / "one/summary.json").read_text())["status"] == "stopped"


def reading(root: Path, **texts: str) -> Step:
    """A step whose settings have these texts."""
    step = fake(root)
    told = SimpleNamespace(config_hash="x", resolved={"data": texts}, select=lambda key: None)
    step.__dict__["settings"] = told
    return step


@pytest.mark.parametrize(
    ("key", "value", "file"),
    [
        ("policy", "their_policy", "their_policy/model.safetensors"),
        ("policy", "./their_policy", "their_policy/tokenizer_config.json"),
        ("path", "pairs", "pairs/train.jsonl"),
        ("function", "my_package.mine.score", "my_package/mine.py"),
        ("function", "my_rewards.py:score", "my_rewards.py"),
    ],
)
def test_what_a_stage_reads_is_known_by_every_name_that_a_setting_may_have(
    tmp_path, monkeypatch, key, value, file
):
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "model.safetensors", file.rpartition("/")[2]):
        path = tmp_path / "their_policy" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("before")
    before = reading(tmp_path, **{key: value, "name": "their"}).read()
    assert f"data.{key}" in before
    (tmp_path / file).write_text("after")
    after = reading(tmp_path, **{key: value, "name": "their"}).read()
    assert after.keys() == before.keys()
    assert after != before
