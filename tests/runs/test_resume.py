from __future__ import annotations

import copy
import json
import logging
import zlib

import torch

from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import claim_run
from rlhf_lightning.runs.resume import (
    checkpoint_iteration,
    checkpoint_problem,
    checksum,
    config_hash,
    newest_complete_checkpoint,
    runs_of,
)
from rlhf_lightning.runs.summary import Summary, write_summary

CONFIG = {
    "seed": 1,
    "resume": "never",
    "ckpt_path": None,
    "paths": {"run": "/home/a/outputs/ppo/2026-11-21_10-00", "artifacts": "artifacts"},
    "logger": {"mode": "auto"},
    "module": {"ppo": {"kl_coef": 0.05}, "policy": "${paths.artifacts}/demo/sft"},
    "data": {"batch_size": 8, "validation_batch_size": None},
    "trainer": {"devices": 1, "num_nodes": 1, "max_epochs": 1},
    "strategy": {"name": "auto", "compute_dtype": None},
    "callbacks": {
        "checkpoint": {"dirpath": "${paths.run}/checkpoints"},
        "progress": {"every_n_seconds": 10, "verbose": False},
        "samples": [{"num_samples": 8}],
    },
}


def changed(*path: str, to: object) -> dict:
    config = copy.deepcopy(CONFIG)
    inner = config
    for key in path[:-1]:
        inner = inner[key]  # type: ignore[assignment]
    assert inner.get(path[-1]) != to
    inner[path[-1]] = to
    return config


def test_the_hash_leaves_out_what_does_not_change_the_training():
    same = [
        changed("resume", to="auto"),
        changed("ckpt_path", to="x.ckpt"),
        changed("logger", to=None),
        changed("hydra", to={"run": {"dir": "x"}}),
        changed("trainer", "devices", to=8),
        changed("strategy", "name", to="fsdp"),
        changed("data", "validation_batch_size", to=4),
        changed("callbacks", "checkpoint", "every_minutes", to=10),
        changed("callbacks", "progress", "verbose", to=True),
    ]
    later = changed("paths", "run", to="/home/b/elsewhere/2026-11-22_11-00")
    for config in (*same, later):
        assert config_hash(config) == config_hash(CONFIG), config


def test_the_hash_changes_with_everything_else():
    different = [
        changed("seed", to=2),
        changed("data", "batch_size", to=4),
        changed("module", "ppo", "kl_coef", to=0.0500001),
        changed("module", "policy", to="${paths.artifacts}/demo/base"),
        changed("module", "policy", to="artifacts_of_mine/demo/sft"),
        changed("trainer", "max_epochs", to=2),
        changed("strategy", "compute_dtype", to="bfloat16"),
        changed("callbacks", "samples", to=[{"num_samples": 9}]),
        changed("module", "verbose", to=True),
    ]
    hashes = [config_hash(config) for config in (CONFIG, *different)]
    assert len(set(hashes)) == len(hashes)
    assert config_hash(dict(reversed(CONFIG.items()))) == hashes[0], "the order of keys is nothing"


def test_the_newest_unfinished_run_of_the_configuration_is_found(tmp_path):
    assert list(runs_of(tmp_path / "nowhere", "a")) == []
    runs = {
        "2026-01-01_00": ("a", "failed"),
        "2026-01-02_00": ("a", "running"),
        "2026-01-03_00": ("b", "running"),
        "2026-01-04_00": ("a", "completed"),
    }
    for name, (digest, status) in runs.items():
        summary = Summary("ppo", status, 1, config_hash=digest)  # type: ignore[arg-type]
        write_summary(RunFolder(tmp_path / name), summary)
    (tmp_path / "2026-01-05_00").mkdir()
    (tmp_path / "2026-01-06_00").mkdir()
    (tmp_path / "2026-01-06_00" / "summary.json").write_text("{")
    assert [run.name for run in runs_of(tmp_path, "a")] == [*runs][1::-1]
    assert list(runs_of(tmp_path, "c")) == []


def test_a_run_that_is_still_being_written_is_passed_over(tmp_path, caplog):
    for name in ("1", "2"):
        write_summary(RunFolder(tmp_path / name), Summary("ppo", "running", 1, config_hash="a"))
    with claim_run(tmp_path / "2"), caplog.at_level(logging.WARNING):
        assert [found.name for found in runs_of(tmp_path, "a")] == ["1"]
    assert "another process" in caplog.text
    assert [found.name for found in runs_of(tmp_path, "a")] == ["2", "1"]


def test_what_cannot_be_loaded_is_told_apart(tmp_path):
    good = tmp_path / "good.ckpt"
    torch.save({"state_dict": {"x": torch.zeros(1000)}}, good)
    assert checkpoint_problem(good) is None
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(good.read_bytes()[:-1000])
    assert "cannot be read" in (checkpoint_problem(cut) or "")
    other = tmp_path / "other.ckpt"
    torch.save({"layer.weight": torch.zeros(2)}, other)
    assert "state_dict" in (checkpoint_problem(other) or "")
    sharded = tmp_path / "sharded.ckpt"
    sharded.mkdir()
    assert "checksums.json is missing" in (checkpoint_problem(sharded) or "")
    torch.save({"epoch": 0}, sharded / "meta.pt")
    sums = {"meta.pt": checksum(sharded / "meta.pt"), "shard-00001": [3, 1]}
    (sharded / "checksums.json").write_text(json.dumps(sums))
    assert "shard-00001 is missing" in (checkpoint_problem(sharded) or "")
    (sharded / "shard-00001").write_bytes(b"abc")
    assert "damaged in shard-00001" in (checkpoint_problem(sharded) or "")
    sums["shard-00001"] = [3, zlib.crc32(b"abc")]
    (sharded / "checksums.json").write_text(json.dumps(sums))
    assert checkpoint_problem(sharded) is None


def test_a_checkpoint_of_another_configuration_is_passed_over(tmp_path, caplog):
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    for iteration, content in enumerate(["", "mine", "other"]):
        torch.save(
            {"state_dict": {}, "config_hash": content},
            folder.checkpoints / f"iteration={iteration:06d}.ckpt",
        )
    sharded = folder.checkpoints / "iteration=000003.ckpt"
    sharded.mkdir()
    torch.save({"config_hash": "other"}, sharded / "meta.pt")
    (sharded / "checksums.json").write_text(json.dumps({"meta.pt": checksum(sharded / "meta.pt")}))
    found = {h: newest_complete_checkpoint(folder, h) for h in ("mine", "other", "third", None)}
    assert {h: checkpoint_iteration(path or "") for h, path in found.items()} == {
        "mine": 1,
        "other": 3,
        "third": 0,  # an older version wrote no hash
        None: 3,
    }
    assert "iteration=000002.ckpt" in caplog.text
