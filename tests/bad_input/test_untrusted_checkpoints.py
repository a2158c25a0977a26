"""A checkpoint that would run code when it is loaded is refused, whoever loads it."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
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
from rlhf_lightning.distributed.checkpoint import read_full
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.resume import (
    CheckpointError,
    check_checkpoint,
    checksum,
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
    words = rf"{evil.name} is refused: it names posix\.system, which would run"
    given = settings_for("sft", start, f"ckpt_path='{evil}'")
    with pytest.raises(CheckpointError, match=words):
        run(given, RunFolder(tmp_path / "new"), [])

    automatic = settings_for("sft", start, "resume=auto")
    digest = automatic.config_hash
    write_summary(folder, replace(read_summary(folder), status="failed", config_hash=digest))
    with pytest.raises(CheckpointError, match=words):
        run(automatic, RunFolder(tmp_path / "newer"), [])
    with pytest.raises(ConfigError, match=r"is refused: it names posix\.system"):
        export(ExportSettings(run=folder.path, to=tmp_path / "out"))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (Evil(eval, "1"), "eval"),
        (Evil(getattr, 1, "real"), "getattr"),
        (Evil(torch.hub.load, "a/b", "c"), r"torch\.hub\.load"),
        (nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
        (Path("x"), r"pathlib\.PosixPath"),
    ],
)
def test_whatever_is_no_plain_value_is_refused_and_named(tmp_path, content, named):
    torch.save({"state_dict": {"a": content}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=rf"a\.ckpt is refused: it names {named}, which") as e:
        read_checkpoint(tmp_path / "a.ckpt")
    assert "\n" not in str(e.value)


def not_one(path: Path, what: str) -> None:
    if what == "plain pickle":
        path.write_bytes(pickle.dumps({"state_dict": {}}))
    elif what == "old format":
        torch.save({"state_dict": {}}, path, _use_new_zipfile_serialization=False)
    elif what == "list":
        torch.save([1, 2], path)
    elif what == "weights":
        torch.save({"layer.weight": torch.zeros(2)}, path)
    elif what == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.txt", "x")
    elif what == "text":
        path.write_text("a checkpoint")
    elif what == "cut":
        torch.save({"state_dict": {"w": torch.zeros(10_000)}}, path)
        path.write_bytes(path.read_bytes()[:20_000])
    elif what == "flipped":
        torch.save({"state_dict": {"w": torch.zeros(10_000)}}, path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("plain pickle", "it was cut short or is no checkpoint"),
        ("old format", "it was cut short or is no checkpoint"),
        ("list", "no checkpoint of a run .it has no state_dict.: give one of checkpoints/"),
        ("weights", "no checkpoint of a run .it has no state_dict.: give one of checkpoints/"),
        ("zip", "it is an archive, but no checkpoint of torch.save"),
        ("text", "it was cut short or is no checkpoint"),
        ("cut", "it was cut short or is no checkpoint"),
        ("flipped", "it is damaged in "),
    ],
)
def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path, what, words):
    path = tmp_path / "a.ckpt"
    not_one(path, what)
    with pytest.raises(CheckpointError, match=f"a.ckpt.*{words}"):
        check_checkpoint(path)


def sharded(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"epoch": 0}, folder / "meta.pt")
    save_file({"state_dict/weight": torch.ones(4, 4)}, folder / "shard-00001.safetensors")
    return signed(folder)


def signed(folder: Path) -> Path:
    sums = {p.name: checksum(p) for p in folder.iterdir() if p.name != "checksums.json"}
    (folder / "checksums.json").write_text(json.dumps(sums))
    return folder


def test_a_sharded_checkpoint_passes(tmp_path):
    check_checkpoint(sharded(tmp_path / "a.ckpt"))


def test_no_part_of_a_sharded_checkpoint_runs_code(tmp_path, marker):
    folder = sharded(tmp_path / "a.ckpt")
    torch.save({"epoch": touch(marker)}, folder / "meta.pt")
    with pytest.raises(CheckpointError, match=r"is refused: it names posix\.system"):
        check_checkpoint(signed(folder))
    with pytest.raises(CheckpointError, match=r"meta\.pt is refused: it names posix\.system"):
        read_full(folder)
    assert not marker.exists()


def test_an_index_of_torchs_own_format_is_not_read(tmp_path, marker):
    folder = tmp_path / "a.ckpt"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(touch(marker)))
    torch.save({"epoch": 0}, folder / "meta.pt")
    with pytest.raises(CheckpointError, match=r"to its end, checksums\.json is missing"):
        check_checkpoint(folder)
    with suppress(Exception):
        read_full(signed(folder))
    assert not marker.exists()


@pytest.mark.parametrize("part", ["meta.pt", "shard-00001.safetensors"])
def test_a_damaged_sharded_checkpoint_is_named_with_its_part(tmp_path, part):
    folder = sharded(tmp_path / "a.ckpt")
    content = (folder / part).read_bytes()
    (folder / part).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"a\.ckpt: it is damaged in {part}"):
        check_checkpoint(folder)
    if part == "meta.pt":
        with pytest.raises(CheckpointError, match=r"a\.ckpt/meta\.pt cannot be read"):
            check_checkpoint(signed(folder))
    (folder / part).unlink()
    with pytest.raises(CheckpointError, match=f"not written to its end, {part} is missing"):
        check_checkpoint(folder)
