"""GRPO on two ranks, each with whole groups: both train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.runs.folder import read_metrics
from tests.builders.models import tiny_policy, tiny_tokenizer
from tests.builders.ranks import ROOT, run_ranks
from tests.builders.record_files import write_material

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    write_material(folder)
    teacher = tiny_policy("llama", seed=7, max_position_embeddings=2048, hidden_size=48)
    teacher.model.save_pretrained(folder / "teacher")
    tiny_tokenizer().save_pretrained(folder / "teacher")
    return folder


@pytest.fixture(scope="module")
def alone(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[str, Path] = {}

    def of(variant: str) -> Path:
        if variant not in done:
            done[variant] = train(material, tmp_path_factory.mktemp("alone"), 1, "auto", variant)
        return done[variant]

    return of


def train(material: Path, folder: Path, devices: int, strategy: str, variant: str) -> Path:
    words = [
        str(material),
        str(folder / "run"),
        str(devices),
        strategy,
        *([variant] if variant else []),
    ]
    run_ranks(
        ["-m", "tests.multiprocess.grpo_stage", *words],
        world_size=devices,
        folder=folder / "logs",
        environment={"PYTHONPATH": str(ROOT)},
        timeout=250,
    ).check()
    return folder / "run"


@pytest.mark.parametrize(
    ("strategy", "variant"),
    [
        *[("ddp", ""), ("fsdp", ""), ("fsdp", "lora"), ("ddp", "lag"), ("fsdp", "lag")],
        *[("ddp", "teacher"), ("fsdp", "teacher"), ("ddp", "reverse"), ("fsdp", "reverse")],
    ],
)
def test_two_ranks_train_what_one_process_does(material, alone, tmp_path, strategy, variant):
    one, two = alone(variant), train(material, tmp_path, 2, strategy, variant)
    rows, expected = (read_metrics(run / "metrics.csv") for run in (two, one))
    assert rows[0]["rollout/kl_per_response"] == 0
    assert rows[-1]["rollout/kl_per_response"] != 0
    assert (rows[-1]["rollout/sampler_gap"] > 1e-3) == (variant == "lag")
    taught = variant in ("teacher", "reverse")
    assert (rows[0].get("rollout/teacher_kl_per_token", 0.0) > 0.1) == taught
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not name.startswith(("time/", "throughput/", "memory/")):
                assert ours[name] == pytest.approx(value, rel=2e-3, abs=1e-4), name
    exported = [load_file(run / "export/model.safetensors") for run in (one, two)]
    start = load_file(material / "policy/model.safetensors")
    for name, value in exported[0].items():
        torch.testing.assert_close(exported[1][name], value, rtol=0, atol=2e-4)
    assert max((exported[1][name] - start[name]).abs().max() for name in start) > 1e-3
