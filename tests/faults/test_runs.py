"""What goes wrong in a whole run, from its configuration to its summary and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.modules.non_finite import NonFiniteError
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.summary import read_summary
from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def own_folder(working_folder: Path) -> None:
    """Whatever a run would make besides its folder ends up here."""


def ppo(folder: Path, start: Path, *overrides: str) -> RunFolder:
    return completed(folder, "ppo", start, "artifacts.reward=null", *overrides)


def reward_file(folder: Path, body: str) -> str:
    file = folder / "my_reward.py"
    file.write_text(f"def score(prompts, completions, **columns):\n    {body}\n")
    return f"scorer.function={file}:score"


def test_a_run_that_stops_at_its_limit_says_so_in_its_summary(start, tmp_path):
    folder = RunFolder(tmp_path / "run")
    broken = "return [1e30 * (i + 1) for i, _ in enumerate(prompts)]"  # its square is no float
    with pytest.raises(NonFiniteError):
        ppo(
            folder.path,
            start,
            reward_file(tmp_path, broken),
            "module.ppo.score_clip=null",
            "module.ppo.max_skipped_steps=1",
        )
    summary = read_summary(folder)
    assert summary.status == "failed"
    assert str(summary.cause).startswith("iteration 2: ")
    saved = folder.faults / "iteration=000002"
    assert str(saved) in str(summary.cause)
    assert saved.name in folder.report.read_text()
    rows = [json.loads(line) for line in (saved / "rank_0.jsonl").read_text().splitlines()]
    assert [row["scores"] for row in rows] == [pytest.approx(1e30 * n) for n in (1, 2, 3, 4)]
    (row,) = read_metrics(folder.metrics)
    assert (row["ppo/skipped_steps"], row["ppo/num_updates"]) == (1, 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "overrides", "message"),
    [
        (
            "ppo",
            ["artifacts.reward=null", "evaluation.max_new_tokens=100"],
            "data.max_prompt_length=64 + evaluation.max_new_tokens=100 = 164",
        ),
        ("sft", ["data.max_length=129"], "data.max_length=129"),
    ],
)
def test_more_tokens_than_the_model_can_read_are_refused_first(
    start, tmp_path, stage, overrides, message
):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        completed(folder.path, stage, start, *overrides)
    assert str(caught.value).startswith(message)
    assert {path.name for path in folder.path.iterdir()} <= {".lock", ".hydra", "run.yaml"}
