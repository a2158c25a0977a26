"""What ranks that share every model export is what one process exports, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.builders.command_lines import overrides_of
from tests.builders.ranks import ROOT, run_ranks
from tests.builders.runs import completed, make_start

pytestmark = pytest.mark.timeout(900)
TRAIN = ["-m", "rlhf_lightning.train"]
# What ranks compute in the weights' own dtype differs from one process by rounding alone.
SHARDED = ["strategy=fsdp", "strategy.compute_dtype=null"]
WORLDS = (2, 4)
STAGES = ("sft", "reward", "ppo")
Exported = Callable[[str, str, int], Path]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Train a stage on so many ranks and return its run folder; each is trained once."""
    where = tmp_path_factory.mktemp("exports")
    start = make_start(where / "start")

    def of(stage: str, lora: str, world_size: int) -> Path:
        folder = where / f"{stage}_{lora}_{world_size}"
        settings = [f"lora={lora}", "data.batch_size=8", "trainer.accelerator=cpu"]
        if stage == "ppo":
            settings.append("artifacts.reward=null")
        if folder.exists():
            return folder
        if world_size == 1:
            completed(folder, stage, start, *settings)
            return folder
        ranks = [f"trainer.devices={world_size}", f"hydra.run.dir={folder}", *SHARDED]
        run_ranks(
            [*TRAIN, *overrides_of(stage, start), *settings, *ranks],
            world_size=world_size,
            folder=where / f"logs_{folder.name}",
            environment={"PYTHONPATH": str(ROOT)},
            timeout=600,
        ).check()
        return folder

    return of


@pytest.mark.parametrize(
    ("stage", "lora", "world_size"),
    [
        # Of FSDP2, in the fast set: tests/multiprocess/test_library.py
        pytest.param("reward", "none", 2, marks=pytest.mark.slow),
        *(
            pytest.param(stage, lora, world_size, marks=pytest.mark.slow)
            for stage in STAGES
            for lora in ("none", "lora")
            for world_size in WORLDS
            if (stage, lora, world_size) != ("reward", "none", 2)
        ),
    ],
)
def test_ranks_export_the_folder_of_one_process(stage, lora, world_size, exported):
    one, ranks = (exported(stage, lora, size) / "export" for size in (1, world_size))
    files = {path.relative_to(one) for path in one.rglob("*.safetensors")}
    assert files == {path.relative_to(ranks) for path in ranks.rglob("*.safetensors")}
    assert len(files) == (2 if lora == "lora" else 1)
    for file in files:
        mine, theirs = load_file(ranks / file), load_file(one / file)
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(
                mine[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    if stage == "reward":
        offsets = [
            json.loads((f / "config.json").read_text())["reward_offset"] for f in (ranks, one)
        ]
        assert abs(offsets[1]) > 0.01, "the head was shifted"
        assert offsets[0] == pytest.approx(offsets[1], abs=1e-4)
