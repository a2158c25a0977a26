"""What is not finite on one rank is skipped, or stops the run, on all of them alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)
SCRIPT = str(Path(__file__).with_name("poisoned_rank.py"))


def train(stage: str, strategy: str, folder: Path, *, limit: int) -> list[dict[str, Any]]:
    run_ranks(
        [SCRIPT, stage, strategy, str(folder), str(limit)],
        world_size=2,
        folder=folder,
        environment={"PYTHONPATH": "."},
        timeout=200,
    ).check()
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(
    ("stage", "strategy"),
    [
        pytest.param("sft", "fsdp", marks=pytest.mark.thorough),
        *(
            pytest.param(stage, strategy, marks=pytest.mark.slow)
            for stage in ("sft", "reward", "ppo")
            for strategy in ("ddp", "fsdp")
            if (stage, strategy) != ("sft", "fsdp")
        ),
    ],
)
def test_all_ranks_skip_the_step_that_one_of_them_broke(stage, strategy, tmp_path):
    ranks = train(stage, strategy, tmp_path, limit=10)
    for rank in ranks:
        assert rank["moved"] == [True, False, True]
        assert [row[f"{stage}/skipped_steps"] for row in rank["rows"]] == [0, 1, 0]
        assert not rank["stopped"]
    assert "iteration 2: " in (tmp_path / "rank_0.log").read_text()
    assert "iteration 2: " not in (tmp_path / "rank_1.log").read_text(), "told once"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_stop_at_the_limit_and_each_keeps_its_own_rows(strategy, tmp_path):
    ranks = train("ppo", strategy, tmp_path, limit=0)
    for rank in ranks:
        assert rank["stopped"].startswith("iteration 2: ppo/")
        assert rank["moved"] == [True]
    saved = tmp_path / "faults" / "iteration=000002"
    assert sorted(path.name for path in saved.iterdir()) == [
        f"rank_{n}.{ext}" for n in (0, 1) for ext in ("jsonl", "safetensors")
    ]
    rows = [
        [json.loads(line)["row_ids"] for line in (saved / f"rank_{n}.jsonl").open()] for n in (0, 1)
    ]
    assert sorted(rows[0] + rows[1]) == list(range(8, 16)), "the second iteration's eight prompts"
