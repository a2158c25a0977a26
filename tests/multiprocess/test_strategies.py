"""The same rows on one, two and four ranks give the same weights and the same samples."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders.models import tiny_policy
from tests.builders.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)
SCRIPT = str(Path(__file__).with_name("train_stage.py"))
STAGES = ("sft", "reward", "ppo", "ppo_lora", "sao")  # SAO freezes parts of a model


def train(
    stage: str, strategy: str, world_size: int, folder: Path, model: str = "llama"
) -> list[dict[str, Any]]:
    folder.mkdir(parents=True)
    if stage == "ppo_lora":
        tiny_policy(model).model.save_pretrained(folder / "base")
    run_ranks(
        [SCRIPT, stage, strategy, str(folder), model],
        world_size=world_size,
        folder=folder,
    ).check()
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(world_size)]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train in one process, each stage once, and return what it ends with."""

    @cache
    def of(stage: str, model: str) -> dict[str, Any]:
        return train(stage, "auto", 1, tmp_path_factory.mktemp("alone") / "run", model)[0]

    return of


def assert_same(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    assert ranks[0]["state"].keys() == one["state"].keys()
    for name, value in one["state"].items():
        torch.testing.assert_close(
            ranks[0]["state"][name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    if "sequences" not in one:
        return
    assert one["steps"] == ranks[0]["steps"] == len(one["sequences"]) * one["passes"]
    for iteration, (whole, mask) in enumerate(zip(one["sequences"], one["masks"], strict=True)):
        got = [
            row[m].tolist()
            for rank in ranks
            for row, m in zip(responses(rank, iteration), rank["masks"][iteration], strict=True)
        ]
        assert got == [r[m].tolist() for r, m in zip(responses(one, iteration), mask, strict=True)]
        assert whole.shape[0] == len(got)
    for rank in ranks:
        assert rank["kl_coef"] == pytest.approx(one["kl_coef"], rel=1e-6)
    assert ranks[0]["metrics"]["rollout/score"] == pytest.approx(
        one["metrics"]["rollout/score"], abs=1e-5
    )


def responses(rank: dict[str, Any], iteration: int) -> torch.Tensor:
    width = rank["masks"][iteration].shape[1]
    return rank["sequences"][iteration][:, -width:]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "strategy", "world_size"),
    [
        ("ppo", "fsdp", 2),
        ("reward", "ddp", 2),
        pytest.param("ppo", "hybrid", 4, marks=pytest.mark.slow),
        pytest.param("ppo", "offload", 2, marks=pytest.mark.slow),
        pytest.param("reward", "offload", 2, marks=pytest.mark.slow),
        *(
            pytest.param(stage, strategy, world_size, marks=pytest.mark.slow)
            for stage in STAGES
            for strategy in ("ddp", "fsdp")
            for world_size in (2, 4)
            if (stage, strategy, world_size) not in (("ppo", "fsdp", 2), ("reward", "ddp", 2))
        ),
    ],
)
def test_ranks_train_what_one_process_trains(stage, strategy, world_size, alone, tmp_path):
    ranks = train(stage, strategy, world_size, tmp_path / "run")
    assert_same(ranks, alone(stage, "llama"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_tied_embeddings_are_sharded_and_averaged_right(strategy, alone, tmp_path):
    ranks = train("ppo", strategy, 2, tmp_path / "run", "gpt2")
    assert_same(ranks, alone("ppo", "gpt2"))
