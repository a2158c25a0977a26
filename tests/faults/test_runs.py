"""What goes wrong in a whole run, from its configuration to its summary and its report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.train import run
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.modules.non_finite import NonFiniteError
from rlhf_lightning.runs.folder import RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.summary import read_summary
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.command_lines import overrides_of, settings_of
from tests.builders.reward_server import serving, slow
from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def own_folder(working_folder: Path) -> None:
    """Whatever a run would make besides its folder ends up here."""


def ppo(folder: Path, start: Path, *overrides: str) -> RunFolder:
    return completed(folder, "ppo", start, "artifacts.reward=null", *overrides)


def reward_file(folder: Path, body: str) -> str:
    file = folder / "my_reward.py"
    file.write_text(f"import math\ndef score(prompts, completions, **columns):\n    {body}\n")
    return f"scorer.function={file}:score"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return {}['nothing']", "raised KeyError: 'nothing'; it was called"),
        ("return [1.0]", "returned 1 scores for 4 completions"),
        ("return [math.nan for _ in prompts]", "returned nan for completion 0"),
    ],
)
def test_a_reward_function_that_fails_ends_the_run_and_is_named(start, tmp_path, body, cause):
    folder = RunFolder(tmp_path / "run")
    cause = f"reward function my_reward.py:score {cause}"
    with pytest.raises((RuntimeError, ValueError), match=re.escape(cause)):
        ppo(folder.path, start, reward_file(tmp_path, body))
    summary = read_summary(folder)
    assert summary.status == "failed"
    assert str(summary.cause).startswith(cause)
    assert "reward function my_reward.py:score" in folder.report.read_text()


def test_scores_that_are_all_equal_train_on_the_kl_alone(start, tmp_path):
    folder = ppo(tmp_path / "run", start, reward_file(tmp_path, "return [0.5 for _ in prompts]"))
    assert read_summary(folder).status == "completed"
    for row in read_metrics(folder.metrics):
        assert row["rollout/score"] == 0.5
        assert row["rollout/score_std"] == 0
        assert row["ppo/skipped_steps"] == 0
        assert row["ppo/num_updates"] == 1
        assert "ppo/policy_loss" in row


@pytest.mark.thorough
def test_answers_that_are_empty_are_scored_as_empty_texts(start, tmp_path):
    """The stop token comes first in every row of every batch."""
    tokenizer = load_tokenizer(start)
    eos = int(tokenizer.eos_token_id)
    fields = {
        "model_type": "phi",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": tokenizer.pad_token_id,
    }
    policy = load_policy(from_scratch=fields)
    state = policy.state_dict()
    state["model.lm_head.bias"][eos] = 100.0
    policy.load_state_dict(state)
    silent = tmp_path / "models" / "silent"
    save_hf_model(policy, tokenizer, silent, policy.state_dict(), stop_ids=[eos])
    body = "return [float(len(c)) if c == '' else math.nan for c in completions]"
    folder = ppo(tmp_path / "run", silent, reward_file(tmp_path, body))
    summary = read_summary(folder)
    assert summary.status == "completed"
    assert summary.metrics["val/response_length"] == 1.0
    for row in read_metrics(folder.metrics):
        assert row["rollout/response_length"] == 1.0
        assert row["rollout/eos_fraction"] == 1.0
        assert row["rollout/score"] == 0.0
        assert row["ppo/num_updates"] == 1
    assert {sample["response"] for sample in read_samples(folder.samples)} == {""}


def test_a_reward_service_that_never_answers_ends_the_run_after_its_retries(start, tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    limits = {"timeout": 0.3, "max_retries": 1}
    given = ["artifacts.reward=null", *(f"scorer.{key}={value}" for key, value in limits.items())]
    own = [o for o in overrides_of("ppo", start) if not o.startswith("scorer")]
    with serving(slow(5.0)) as server:
        settings = settings_of(*own, "scorer=http", f"scorer.url={server.url}", *given)
        with pytest.raises(RuntimeError, match="did not answer: ReadTimeout"):
            run(settings, folder, [])
    summary = read_summary(folder)
    assert summary.status == "failed"
    assert server.url in str(summary.cause)


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
            ["artifacts.reward=null", "module.sampling.max_new_tokens=65"],
            "data.max_prompt_length=64 + module.sampling.max_new_tokens=65 = 129",
        ),
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
    assert read_summary(folder).cause == str(caught.value)
    assert not folder.metrics.exists()
