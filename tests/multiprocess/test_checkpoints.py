"""A checkpoint of one strategy loads under another, whole or in shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.app.config.commands import ExportSettings
from rlhf_lightning.app.export import run as export
from rlhf_lightning.callbacks.checkpointing import AtomicCheckpointIO
from rlhf_lightning.runs.resume import checkpoint_problem
from tests.builders.command_lines import overrides_of
from tests.builders.ranks import run_ranks
from tests.builders.runs import make_start

SCRIPT = str(Path(__file__).with_name("checkpoint_stage.py"))
RANKS = {"auto": 1, "ddp": 2, "fsdp": 2, "fsdp4": 4, "hybrid": 4, "offload": 2}
SHARDING = ("fsdp", "fsdp4", "hybrid", "offload")


def launch(
    what: str,
    name: str,
    folder: Path,
    *checkpoints: str,
    environment: Mapping[str, str] | None = None,
) -> None:
    folder.mkdir(parents=True)
    run_ranks(
        [SCRIPT, what, name.rstrip("4"), str(folder), *checkpoints],
        world_size=RANKS[name],
        folder=folder,
        timeout=400,
        environment=environment,
    ).check()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("saved")

    @cache
    def of(name: str) -> Path:
        launch("save", name, root / name)
        return root / name

    return of


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            yield from leaves(value, f"{path}/{key}")
        else:
            yield f"{path}/{key}", value


def assert_same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                value,
                theirs[name],
                rtol=0,
                atol=tolerance,
                equal_nan=True,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        else:
            assert value == pytest.approx(theirs[name], abs=tolerance), name


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_shards_hold_what_the_whole_file_holds(saved):
    folder = saved("fsdp")
    whole = torch.load(folder / "full.ckpt", weights_only=True)
    shards = AtomicCheckpointIO().load_checkpoint(folder / "sharded.ckpt")
    assert_same(shards, whole)
    files = sorted((folder / "sharded.ckpt").glob("*.safetensors"))
    assert len(files) == 2, "each rank writes a file"
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 0.7 * sum(sizes), "they share the tensors"
    assert not list(folder.glob(".*tmp*"))


@pytest.mark.timeout(600)
def test_a_shard_that_is_damaged_or_missing_is_noticed(saved, tmp_path):
    damaged = tmp_path / "damaged.ckpt"
    shutil.copytree(saved("fsdp") / "sharded.ckpt", damaged)
    assert checkpoint_problem(damaged) is None
    shard = sorted(damaged.glob("*.safetensors"))[1]
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    assert f"it is damaged in {shard.name}" in (checkpoint_problem(damaged) or "")
    shard.unlink()
    assert f"{shard.name} is missing" in (checkpoint_problem(damaged) or "")
    assert json.loads((damaged / "checksums.json").read_text()).keys() >= {shard.name, "meta.pt"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("reader", list(RANKS))
def test_a_checkpoint_of_each_strategy_loads_under_each(saved, tmp_path, reader):
    checkpoints, states = [], []
    for writer in RANKS:
        folder = saved(writer)
        for kind in ("full", "sharded") if writer in SHARDING else ("full",):
            checkpoints.append(str(folder / f"{kind}.ckpt"))
            states.append(torch.load(folder / "0.pt", weights_only=True))
    launch("load", reader, tmp_path / "read", *checkpoints)
    for number, state in enumerate(states):
        found = torch.load(tmp_path / "read" / f"{number}.pt", weights_only=True)
        assert_same(found["start"], state["start"])
        # Bitwise under the strategy that wrote it; other ranks add up in another order.
        same = Path(checkpoints[number]).parent.name == reader
        assert_same(found["end"], state["end"], 0.0 if same else 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_parameter_that_was_not_trained_yet_has_no_optimizer_state_after_a_resume(tmp_path):
    # Two iterations train the value model alone; the third, after the resume, the policy too.
    saved = tmp_path / "saved"
    launch("save", "fsdp", saved, environment={"CRITIC_WARMUP": "2"})
    state = torch.load(saved / "0.pt", weights_only=True)
    checkpoints = [str(saved / f"{kind}.ckpt") for kind in ("full", "sharded")]
    for reader, tolerance in {"fsdp": 0.0, "auto": 1e-5}.items():
        launch("load", reader, tmp_path / reader, *checkpoints, environment={"CRITIC_WARMUP": "2"})
        for number in range(2):
            found = torch.load(tmp_path / reader / f"{number}.pt", weights_only=True)
            assert_same(found["start"], state["start"])
            assert_same(found["end"], state["end"], tolerance)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lora", ["none", "lora"])  # names of adapters have slashes
def test_a_run_is_exported_from_its_shards(tmp_path, lora):
    start = make_start(tmp_path / "models" / "start")
    run_ranks(
        [
            *("-m", "rlhf_lightning.train", *overrides_of("sft", start), "trainer.accelerator=cpu"),
            *("trainer.devices=2", "strategy=fsdp", f"lora={lora}"),
            *(f"paths.outputs={tmp_path}/outputs", f"paths.artifacts={tmp_path}/artifacts"),
        ],
        world_size=2,
        folder=tmp_path / "logs",
        timeout=400,
        working_folder=tmp_path,
    ).check()
    (run,) = (path.parent for path in tmp_path.glob("outputs/sft/*/summary.json"))
    assert (run / "checkpoints" / "last.ckpt").is_dir()
    export(ExportSettings(run=run / "checkpoints" / "last.ckpt", to=tmp_path / "exported"))
    made, wanted = (
        load_file(f / "model.safetensors") for f in (tmp_path / "exported", run / "export")
    )
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)
