"""Runs that start from each other: when one counts as done, and what a kill or a signal leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_lightning.app.study.engine import (
    ATTEMPTS,
    Engine,
    FailedRunError,
    Run,
    outcome,
    recorded,
)
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError, claim_run, is_claimed
from rlhf_lightning.runs.stopping import RunStoppedError, stopping_on_signals
from tests.builders.command_lines import environment

pytestmark = pytest.mark.timeout(120)
# A command: it writes its summary, waits for a file `go`, and publishes what it has read.
COMMAND = """
import json, pathlib, signal, sys, time
root, name, hash = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder = root / name / "train" / str(time.time_ns())
folder.mkdir(parents=True)
def tell(status):
    cause = "it was asked to" if status == "stopped" else None
    content = {"stage": "sft", "status": status, "seed": 1, "config_hash": hash, "cause": cause}
    (folder / "summary.json").write_text(json.dumps(content))
def stop(*_):
    tell("stopped")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
tell("running")
(root / "begun").write_text(name)
while not (root / "go").exists():
    time.sleep(0.02)
if (root / "silent").exists():
    sys.exit(0)
if (root / "fails").exists():
    sys.exit("error: it failed")
(root / f"{name}.model").write_text((root / "rows.jsonl").read_text())
tell("completed")
"""


@dataclass(frozen=True, kw_only=True)
class Fake(Run):
    """A run of that command."""

    root: Path
    title: str = "one"

    @property
    def name(self) -> str:
        return self.title

    @cached_property
    def settings(self) -> SimpleNamespace:
        return SimpleNamespace(
            config_hash="x", resolved={"data": {"path": str(self.root / "rows.jsonl")}}
        )

    @property
    def published(self) -> list[Path]:
        return [self.root / f"{self.name}.model"]

    def command_line(self) -> list[str]:
        return [sys.executable, "-c", COMMAND, str(self.root), self.name, "x"]


def fake(root: Path, title: str = "one", needs: tuple[Run, ...] = ()) -> Fake:
    return Fake(command="train", words=(), place=root / title, root=root, title=title, needs=needs)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("1")
    (tmp_path / "go").touch()
    return tmp_path


def carried_out(root: Path, *runs: Run, jobs: int = 1) -> dict[str, float | None]:
    """Carry them out; return the seconds of those that began or were done."""
    took: dict[str, float | None] = {}

    def ends(run: Run, seconds: float | None) -> bool:
        took[run.name] = seconds
        return run.is_done()

    with claim_run(root) as claim, stopping_on_signals():
        Engine(RunFolder(root), claim, jobs=jobs, logged=True).run(runs, ends)
    return took


def until(true: Callable[[], object]) -> None:
    begun = time.monotonic()
    while not true():
        assert time.monotonic() < begun + 60
        time.sleep(0.02)


def test_what_is_done_is_not_run_again_and_what_needs_it_starts(root: Path) -> None:
    first = fake(root)
    second = fake(root, "two", needs=(first,))
    took = carried_out(root, first, second)
    assert None not in took.values()
    assert carried_out(root, first, second) == {"one": None, "two": None}


def replace_model(root: Path) -> None:
    (root / "one.model").write_text("of another run")


def tear(root: Path) -> None:
    """End the record in the middle of a line, as a full disk does."""
    (record,) = root.glob(f"*/{ATTEMPTS}")
    record.write_bytes(record.read_bytes()[:-20])


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (lambda root: None, True),
    "an input was edited": (lambda root: (root / "rows.jsonl").write_text("2"), False),
    "its model was replaced": (replace_model, False),
    "its model is gone": (lambda root: (root / "one.model").unlink(), False),
    "its end was not seen": (tear, True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_done_while_what_it_was_given_and_made_is_unchanged(
    root: Path, change: str
) -> None:
    run = fake(root)
    carried_out(root, run)
    make, done = CHANGES[change]
    make(root)
    assert run.is_done() is done
    assert (carried_out(root, run)["one"] is None) is done
    assert run.is_done()
    assert (root / "one.model").read_text() == (root / "rows.jsonl").read_text()
    replace_model(root)
    assert not run.is_done()


@pytest.mark.parametrize("end", ["silent", "fails"])
def test_a_run_that_ends_without_a_result_is_not_done_and_holds_up_those_that_need_it(
    root: Path, end: str
) -> None:
    (root / end).touch()
    first = fake(root)
    second = fake(root, "two", needs=(first,))
    assert list(carried_out(root, first, second)) == ["one"]
    told = {"silent": f"exit status 0, see {first.place / 'log.txt'}", "fails": "it failed"}
    assert outcome(first) == ("failed", told[end])
    assert outcome(second) == ("not run", "one has not completed")


def test_a_result_of_other_inputs_does_not_count_where_the_run_with_the_new_ones_fails(
    root: Path,
) -> None:
    run = fake(root)
    carried_out(root, run)
    (root / "rows.jsonl").write_text("2")
    (root / "fails").touch()
    carried_out(root, run)
    assert outcome(run) == ("failed", "it failed")
    (root / "rows.jsonl").write_text("1")
    assert not run.is_done()


PARENT = """
import sys
from pathlib import Path
from tests.entry.test_engine import carried_out, fake
root = Path(sys.argv[1])
carried_out(root, fake(root))
"""


@pytest.fixture
def parent(root: Path) -> subprocess.Popen[bytes]:
    """Another process that carries out a run, which waits."""
    (root / "go").unlink()
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(root)], env=environment(), stderr=subprocess.DEVNULL
    )
    until((root / "begun").exists)
    return process


def status(root: Path) -> str:
    (file,) = root.glob("one/*/*/summary.json")
    return str(json.loads(file.read_text())["status"])


def test_the_folder_is_taken_while_a_run_of_a_killed_parent_lives(root, parent) -> None:
    parent.kill()
    parent.wait()
    with pytest.raises(FolderTakenError, match=rf"process {parent.pid}, \d+ on"):
        carried_out(root, fake(root))
    assert status(root) == "running"
    (root / "go").touch()
    until(lambda: not is_claimed(root))
    assert carried_out(root, fake(root)) == {"one": None}, "it has completed by itself"
    assert len(list(root.glob("one/*/*/summary.json"))) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_runs_too(root, parent, number) -> None:
    parent.send_signal(number)
    parent.wait(timeout=60)
    assert status(root) == "stopped"
    assert not is_claimed(root)
    assert [one.code for one in fake(root).attempts()] == [None, 75]


def test_several_runs_at_a_time_are_all_ended(root: Path) -> None:
    (root / "go").unlink()
    one, two = fake(root), fake(root, "two")

    def kill() -> None:
        until(lambda: len(list(root.glob("*/*/*/summary.json"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RunStoppedError):
        carried_out(root, one, two, jobs=2)
    assert [outcome(run)[0] for run in (one, two)] == ["stopped", "stopped"]


@pytest.mark.parametrize(
    ("key", "value", "file"),
    [
        ("policy", "their_policy", "their_policy/model.safetensors"),
        ("policy", "./their_policy", "their_policy/chat_template.jinja"),
        ("policy", "./their_policy", "their_policy/generation_config.json"),
        ("policy", "./their_policy", "their_policy/tokenizer_config.json"),
        ("path", "pairs", "pairs/train.jsonl"),
        ("function", "my_rewards.score", "my_rewards.py"),
        ("function", "my_package.mine.score", "my_package/mine.py"),
        ("function", "my_rewards.py:score", "my_rewards.py"),
    ],
)
def test_what_a_run_is_given_is_known_by_every_name_that_a_setting_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "model.safetensors", file.rpartition("/")[2]):
        path = tmp_path / "their_policy" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("before")
    run = fake(tmp_path)
    told = SimpleNamespace(config_hash="x", resolved={"data": {key: value, "name": "their"}})
    monkeypatch.setattr(Fake, "settings", told)
    before = run.given()
    assert before
    assert run.given() == before
    (tmp_path / file).write_text("after")
    assert run.given().keys() == before.keys()
    assert run.given() != before


@pytest.mark.parametrize("key", ["template", "function", "path"])
@pytest.mark.parametrize("text", ["x" * 5000, "x." * 2500 + "y", "a/" * 3000, "a\0b", "~" * 300])
def test_a_text_that_is_no_path_is_none_at_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, text: str
) -> None:
    told = SimpleNamespace(config_hash="x", resolved={"data": {key: text}})
    monkeypatch.setattr(Fake, "settings", told)
    assert fake(tmp_path).given() == {}


def test_a_page_that_cannot_be_written_does_not_hide_how_the_runs_ended(root: Path, capsys) -> None:
    def fails() -> None:
        raise ValueError("the figures of a run cannot be read")

    told = {"config_hash": "x", "title": "", "kind": "study", "seed": 1}
    settings: Any = SimpleNamespace(**told, select=lambda key: None)
    with pytest.raises(FailedRunError, match="what happened"):  # noqa: SIM117
        with recorded("study", settings, RunFolder(root / "all"), fails):
            raise FailedRunError("what happened", 1)
    assert "the page of the study was not written: the figures" in capsys.readouterr().out
