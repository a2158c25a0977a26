"""FSDP2 over NCCL, and its rehearsal over gloo: sharded command lines end as one CPU process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import read_summary
from tests.builders.command_lines import overrides_of
from tests.builders.ranks import ROOT, run_ranks
from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(600)
# What ranks compute in the weights' own dtype differs from one process by rounding alone.
SHARDED = ["strategy=fsdp", "strategy.compute_dtype=null", "trainer.matmul_precision=highest"]


def own_settings(stage: str, lora: str) -> list[str]:
    reward = ["artifacts.reward=null"] if stage == "ppo" else []
    return [f"lora={lora}", "data.batch_size=8", *reward]


def sharded(
    stage: str, lora: str, accelerator: str, world_size: int, start: Path, folder: Path
) -> RunFolder:
    """Run a command line on so many ranks and return its folder."""
    ranks = [f"trainer.devices={world_size}", f"trainer.accelerator={accelerator}"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(world_size))))
    run_ranks(
        [
            "-m",
            "rlhf_lightning.train",
            *overrides_of(stage, start),
            *own_settings(stage, lora),
            *ranks,
            *SHARDED,
            f"hydra.run.dir={folder}",
        ],
        world_size=world_size,
        folder=folder.with_name("logs"),
        environment={
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": visible if accelerator == "gpu" else "",
        },
        timeout=300,
        fresh=accelerator == "gpu",
    ).check()
    return RunFolder(folder)


CASES = [("sft", "none"), ("reward", "none"), ("ppo", "none"), ("ppo", "lora")]


@pytest.mark.parametrize(
    ("accelerator", "stage", "lora", "world_size"),
    [
        pytest.param("cpu", "sft", "none", 2, marks=pytest.mark.slow),
        *(
            pytest.param("gpu", *case, size, marks=pytest.mark.gpu)
            for size in (1, 2, 4)
            for case in CASES
        ),
    ],
)
def test_a_sharded_run_exports_what_one_process_exports(
    accelerator, stage, lora, world_size, start, tmp_path
):
    if accelerator == "gpu" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, here are {torch.cuda.device_count()}")
    own = [*own_settings(stage, lora), "trainer.accelerator=cpu"]
    here = completed(tmp_path / "one", stage, start, *own)
    there = sharded(stage, lora, accelerator, world_size, start, tmp_path / "ranks")
    found, expected = (load_file(run.export / "model.safetensors") for run in (there, here))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-2, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    found_metrics, metrics = read_summary(there).metrics, read_summary(here).metrics
    assert metrics
    assert found_metrics.keys() == metrics.keys()
    assert there.last_checkpoint.exists()
