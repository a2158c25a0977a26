"""What ranks that share every model export is what one process exports, tensor by tensor.

FSDP2 over gloo on CPUs, and over NCCL where there are GPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import read_summary
from tests.builders.command_lines import overrides_of
from tests.builders.ranks import run_ranks
from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(900)
# What ranks compute in the weights' own dtype differs from one process by rounding alone.
SHARDED = ["strategy=fsdp", "strategy.compute_dtype=null", "trainer.matmul_precision=highest"]
ON_CPUS = [(stage, lora) for stage in ("sft", "reward", "ppo") for lora in ("none", "lora")]
ON_GPUS = [("sft", "none"), ("reward", "none"), ("ppo", "none"), ("ppo", "lora")]
# Of FSDP2 in the fast set: tests/multiprocess/test_objectives.py
CASES = [
    *(
        pytest.param("cpu", *case, size, marks=pytest.mark.slow)
        for case in ON_CPUS
        for size in (2, 4)
    ),
    *(
        pytest.param("gpu", *case, size, marks=pytest.mark.gpu)
        for size in (1, 2, 4)
        for case in ON_GPUS
    ),
]


def own_settings(stage: str, lora: str) -> list[str]:
    reward = ["artifacts.reward=null"] if stage == "ppo" else []
    return [f"lora={lora}", "data.batch_size=8", *reward]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Callable[[str, str], RunFolder]:
    """Train a stage in this process and return its run folder; each is trained once."""

    @cache
    def of(stage: str, lora: str) -> RunFolder:
        own = [*own_settings(stage, lora), "trainer.accelerator=cpu"]
        return completed(tmp_path_factory.mktemp("alone") / "run", stage, start, *own)

    return of


def sharded(
    stage: str, lora: str, accelerator: str, world_size: int, start: Path, folder: Path
) -> RunFolder:
    """Run a command line on so many ranks and return its folder."""
    ranks = [f"trainer.devices={world_size}", f"trainer.accelerator={accelerator}"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(world_size))))
    run_ranks(
        [
            *("-m", "rlhf_lightning.train", *overrides_of(stage, start)),
            *(*own_settings(stage, lora), *ranks, *SHARDED, f"hydra.run.dir={folder}"),
        ],
        world_size=world_size,
        folder=folder.with_name("logs"),
        environment={"CUDA_VISIBLE_DEVICES": visible if accelerator == "gpu" else ""},
        timeout=600,
        fresh=accelerator == "gpu",
    ).check()
    return RunFolder(folder)


@pytest.mark.parametrize(("accelerator", "stage", "lora", "world_size"), CASES)
def test_a_sharded_run_exports_what_one_process_exports(
    accelerator, stage, lora, world_size, start, alone, tmp_path
):
    if accelerator == "gpu" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, here are {torch.cuda.device_count()}")
    on_gpus = accelerator == "gpu"
    one = alone(stage, lora)
    ranks = sharded(stage, lora, accelerator, world_size, start, tmp_path / "ranks")
    files = {path.relative_to(one.export) for path in one.export.rglob("*.safetensors")}
    assert files == {path.relative_to(ranks.export) for path in ranks.export.rglob("*.safetensors")}
    assert len(files) == (2 if lora == "lora" else 1)
    tolerance = {"rtol": 1e-2, "atol": 1e-4} if on_gpus else {"rtol": 1e-4, "atol": 1e-5}
    for file in files:
        mine, theirs = load_file(ranks.export / file), load_file(one.export / file)
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(
                mine[name], tensor, **tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    if stage == "reward" and not on_gpus:
        mine, theirs = (
            json.loads((run.export / "config.json").read_text())["reward_offset"]
            for run in (ranks, one)
        )
        assert abs(theirs) > 0.01, "the head was shifted"
        assert mine == pytest.approx(theirs, abs=1e-4)
    if stage == "sft" or on_gpus:
        assert read_summary(ranks).metrics.keys() == read_summary(one).metrics.keys() != set()
    assert ranks.last_checkpoint.exists()
