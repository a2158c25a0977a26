"""PPO, DPO and GRPO from Python on two ranks: they train as one process does.

Each rank computes a share of DPO's reference, and has whole groups of GRPO.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lightning.runs.folder import read_metrics
from tests.builders.models import tiny_policy, tiny_tokenizer
from tests.builders.ranks import run_ranks
from tests.builders.record_files import write_material

pytestmark = pytest.mark.timeout(300)
MEASURES = ("loss", "accuracy", "chosen_reward", "rejected_reward", "margin", "grad_norm")


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
    """Train in one process, each objective once, and return the run."""
    return cache(lambda *what: train(material, tmp_path_factory.mktemp("alone"), 1, "auto", *what))


def train(material: Path, folder: Path, devices: int, strategy: str, *what: str) -> Path:
    words = [str(material), str(folder / "run"), str(devices), strategy, *what]
    run_ranks(
        ["-m", "tests.multiprocess.objective_stage", *words],
        world_size=devices,
        folder=folder / "logs",
        timeout=250,
    ).check()
    return folder / "run"


def assert_same_policy(one: Path, two: Path, material: Path, moved: float) -> None:
    exported = [load_file(run / "export/model.safetensors") for run in (one, two)]
    start = load_file(material / "policy/model.safetensors")
    for name, value in exported[0].items():
        torch.testing.assert_close(exported[1][name], value, rtol=0, atol=2e-4)
    assert max((exported[1][name] - start[name]).abs().max() for name in start) > moved


def test_ppo_under_fsdp2_exports_the_policy_of_one_process(material, alone, tmp_path):
    one, two = alone("ppo"), train(material, tmp_path, 2, "fsdp", "ppo")
    assert [len(read_metrics(run / "metrics.csv")) for run in (one, two)] == [2, 2]
    assert_same_policy(one, two, material, moved=1e-3)


@pytest.mark.parametrize(
    ("strategy", "variant"),
    [
        ("ddp", ""),
        pytest.param("fsdp", "", marks=pytest.mark.slow),
        pytest.param("fsdp", "lora", marks=pytest.mark.thorough),
        pytest.param("ddp", "kto", marks=pytest.mark.slow),
        pytest.param("fsdp", "kto", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_learn_from_pairs_what_one_process_does(
    material, alone, tmp_path, strategy, variant
):
    one, two = alone("dpo", variant), train(material, tmp_path, 2, strategy, "dpo", variant)
    first, *_ = rows = read_metrics(two / "metrics.csv")
    assert [first[f"dpo/{name}"] for name in MEASURES[1:5]] == [0, 0, 0, 0]
    for ours, theirs in zip(rows, read_metrics(one / "metrics.csv"), strict=True):
        for name in (*MEASURES, "kl") if variant == "kto" else MEASURES:
            assert ours[f"dpo/{name}"] == pytest.approx(theirs[f"dpo/{name}"], rel=1e-3, abs=1e-4)
        held_out = {name for name in theirs if name.startswith("val/") and theirs[name] is not None}
        assert {name: ours[name] for name in held_out} == pytest.approx(
            {name: theirs[name] for name in held_out}, rel=1e-3, abs=1e-4
        )
    assert "val/loss" in held_out, "the last row has the figures of the held-out pairs"
    assert_same_policy(one, two, material, moved=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "variant"),
    [
        *[("ddp", ""), ("fsdp", ""), ("fsdp", "lora"), ("ddp", "lag"), ("fsdp", "lag")],
        *[("ddp", "teacher"), ("fsdp", "teacher"), ("ddp", "reverse"), ("fsdp", "reverse")],
    ],
)
def test_two_ranks_learn_from_groups_what_one_process_does(
    material, alone, tmp_path, strategy, variant
):
    one, two = alone("grpo", variant), train(material, tmp_path, 2, strategy, "grpo", variant)
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
    assert_same_policy(one, two, material, moved=1e-3)
