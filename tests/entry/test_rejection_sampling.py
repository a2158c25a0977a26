"""Rejection sampling: `collect records=demonstrations`, and SFT on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.preferences.records import Candidate, read_records
from rlhf_lightning.preferences.reward_annotator import RewardModelAnnotator
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import read_summary
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.command_lines import settings_of

pytestmark = pytest.mark.timeout(300)
SMALL = [
    "records=demonstrations",
    "artifacts.base=null",
    "candidates.num_prompts=40",
    "candidates.num_samples=2",
    "candidates.max_new_tokens=8",
    "lab.keep_unfinished=true",
]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Path:
    """A reward model of random weights."""
    folder = tmp_path_factory.mktemp("models") / "reward"
    model, tokenizer = load_scalar_model(start, head="reward", seed=3), load_tokenizer(start)
    stops = [int(tokenizer.eos_token_id)]
    save_hf_model(model, tokenizer, folder, model.state_dict(), stop_ids=stops)
    return folder


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory, start: Path, reward: Path) -> RunFolder:
    from rlhf_lightning.app.collect import run

    folder = RunFolder(tmp_path_factory.mktemp("collected") / "run")
    given = [f"artifacts.sft={start}", f"artifacts.reward={reward}", *SMALL]
    given += [f"artifacts.publish={folder.path.parent}/demonstrations"]
    run(settings_of(*given, entry="collect"), folder, given)
    return folder


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_prompt_gets_the_answer_that_the_reward_model_scores_best(
    collected: RunFolder, reward: Path
) -> None:
    rows = rows_of(collected.path / "data" / "train.jsonl")
    asked = list(read_records(Candidate, collected.path / "candidates.jsonl"))
    scores = RewardModelAnnotator(reward).scores([(c.prompt, c.response) for c in asked])
    best: dict[str, float] = {}
    for candidate, score in zip(asked, scores, strict=True):
        assert score is not None
        best[candidate.prompt] = max(score, best.get(candidate.prompt, score))
    assert len(asked) > 100  # of 40 prompts in four ways, twice
    assert {row["prompt"]: row["score"] for row in rows} == pytest.approx(best, abs=1e-5)
    said = {(c.prompt, c.response) for c in asked}
    assert all((row["prompt"], row["completion"]) in said for row in rows)
    assert rows_of(collected.path.parent / "demonstrations" / "train.jsonl") == rows
    found = read_summary(collected).metrics
    assert found["collect/train_records"] == len(rows) == 40
    assert found["collect/score_best"] > found["collect/score"] + 0.1
    assert found["collect/usable_candidates"] == len(asked)
    assert {"collect/gold", "collect/gold_best"} <= set(found)
