"""A checkpoint that would run code when it is loaded is refused, whoever loads it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rlhf_lightning.app.config.commands import ExportSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.export import run as export
from rlhf_lightning.app.train import run
from rlhf_lightning.distributed.checkpoint import META, load_shards, load_whole, read_full
from rlhf_lightning.modules.pretrained import read_checkpoint as read_changed
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.resume import (
    CheckpointError,
    check_checkpoint,
    checksum,
    newest_complete_checkpoint,
    read_checkpoint,
)
from rlhf_lightning.runs.summary import read_summary, write_summary
from tests.builders.runs import completed, settings_for

pytestmark = pytest.mark.timeout(120)


class Evil:
    """Becomes a call when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def touch(marker: Path) -> Evil:
    return Evil(os.system, f"touch {marker}")


def evil_checkpoint(path: Path, marker: Path) -> Path:
    torch.save({"state_dict": {}, "loops": touch(marker)}, path)
    return path


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def test_the_evil_is_real(tmp_path, marker):
    torch.load(evil_checkpoint(tmp_path / "a.ckpt", marker), weights_only=False)
    assert marker.exists()


@pytest.mark.thorough
def test_a_run_resumes_from_no_checkpoint_that_runs_code(start, tmp_path, marker, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = completed(tmp_path / "outputs" / "sft" / "2026-01-01_00-00-00", "sft", start)
    evil = evil_checkpoint(folder.checkpoints / "iteration=000009.ckpt", marker)
    given = settings_for("sft", start, f"ckpt_path='{evil}'")
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        run(given, RunFolder(tmp_path / "new"), [])

    automatic = settings_for("sft", start, "resume=auto")
    digest = automatic.config_hash
    write_summary(folder, replace(read_summary(folder), status="failed", config_hash=digest))
    assert newest_complete_checkpoint(folder).name == "iteration=000003.ckpt"
    with pytest.raises(ConfigError, match=r"is refused: it names posix\.system"):
        export(ExportSettings(run=evil, to=tmp_path / "out"))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (Evil(eval, "1"), "eval"),
        (nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
        (Path("x"), r"pathlib\.PosixPath"),
    ],
)
def test_whatever_is_no_plain_value_is_refused_and_named(tmp_path, content, named):
    torch.save({"state_dict": {"a": content}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=rf"a\.ckpt is refused: it names {named}, which") as e:
        read_checkpoint(tmp_path / "a.ckpt")
    assert "\n" not in str(e.value)


def signed(folder: Path) -> Path:
    sums = {p.name: checksum(p) for p in folder.iterdir() if p.name != "checksums.json"}
    (folder / "checksums.json").write_text(json.dumps(sums))
    return folder


def test_no_part_of_a_sharded_checkpoint_runs_code(tmp_path, marker):
    folder = tmp_path / "a.ckpt"
    folder.mkdir()
    torch.save({"epoch": 0}, folder / "meta.pt")
    save_file({"state_dict/weight": torch.ones(4, 4)}, folder / "shard-00001.safetensors")
    check_checkpoint(signed(folder))
    torch.save({"epoch": touch(marker)}, folder / "meta.pt")
    with pytest.raises(CheckpointError, match=r"is refused: it names posix\.system"):
        check_checkpoint(signed(folder))
    with pytest.raises(CheckpointError, match=r"meta\.pt is refused: it names posix\.system"):
        read_full(folder)
    assert not marker.exists()


def test_code_in_a_checkpoint_is_one_line_and_is_not_run(tmp_path):
    made, file, model = tmp_path / "made", tmp_path / META, torch.nn.Linear(1, 1)
    for read in (
        lambda: read_full(tmp_path),
        lambda: load_shards(tmp_path, model, []),
        lambda: load_whole(file, model, []),
        lambda: read_changed(file, {}),
    ):
        torch.save({"x": touch(made)}, file)
        with pytest.raises(CheckpointError, match=META) as told:
            read()
        assert "\n" not in str(told.value)
        file.write_bytes(pickle.dumps(touch(made)))
        with pytest.raises(CheckpointError, match=META):
            read()
    assert not made.exists()
