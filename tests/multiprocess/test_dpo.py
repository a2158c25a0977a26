"""DPO on two ranks: each computes a share of the reference, and both train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.runs.folder import read_metrics
from tests.builders.ranks import ROOT, run_ranks
from tests.builders.record_files import write_material

pytestmark = pytest.mark.timeout(300)
MEASURES = ("loss", "accuracy", "chosen_reward", "rejected_reward", "margin", "grad_norm")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    write_material(folder)
    return folder


@pytest.fixture(scope="module")
def alone(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[str, Path] = {}

    def of(how: str) -> Path:
        if how not in done:
            done[how] = train(material, tmp_path_factory.mktemp("alone"), 1, "auto", how)
        return done[how]

    return of


def train(material: Path, folder: Path, devices: int, strategy: str, how: str) -> Path:
    words = [str(material), str(folder / "run"), str(devices), strategy, *([how] if how else [])]
    run_ranks(
        ["-m", "tests.multiprocess.dpo_stage", *words],
        world_size=devices,
        folder=folder / "logs",
        environment={"PYTHONPATH": str(ROOT)},
        timeout=250,
    ).check()
    return folder / "run"


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("ddp", ""),
        pytest.param("fsdp", "", marks=pytest.mark.slow),
        ("fsdp", "lora"),
        pytest.param("ddp", "kto", marks=pytest.mark.slow),
        pytest.param("fsdp", "kto", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_what_one_process_does(material, alone, tmp_path, strategy, how):
    one, two = alone(how), train(material, tmp_path, 2, strategy, how)
    first, *_ = rows = read_metrics(two / "metrics.csv")
    assert [first[f"dpo/{name}"] for name in MEASURES[1:5]] == [0, 0, 0, 0]
    for ours, theirs in zip(rows, read_metrics(one / "metrics.csv"), strict=True):
        for name in (*MEASURES, "kl") if how == "kto" else MEASURES:
            assert ours[f"dpo/{name}"] == pytest.approx(theirs[f"dpo/{name}"], rel=1e-3, abs=1e-4)
        held_out = {name for name in theirs if name.startswith("val/") and theirs[name] is not None}
        assert {name: ours[name] for name in held_out} == pytest.approx(
            {name: theirs[name] for name in held_out}, rel=1e-3, abs=1e-4
        )
    assert "val/loss" in held_out, "the last row has the figures of the held-out pairs"
    exported = [load_file(run / "export/model.safetensors") for run in (one, two)]
    start = load_file(material / "policy/model.safetensors")
    for name, value in exported[0].items():
        torch.testing.assert_close(exported[1][name], value, rtol=0, atol=2e-4)
    assert max((exported[1][name] - start[name]).abs().max() for name in start) > 1e-4
