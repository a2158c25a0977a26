"""What the evaluation and the collections of a pipeline take over from what it trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from rlhf_lightning.app.config.compose import conf_dir, plain
from rlhf_lightning.app.evaluate_parts import check_evaluation
from rlhf_lightning.app.pipeline.steps import check_pipeline, plan
from tests.entry.test_pipeline import composed

SENTIMENT = [
    "experiments.base=null",
    *(f"experiments.{stage}={stage}_smollm2_sentiment" for stage in ("sft", "reward", "ppo")),
    "train:dataset.positive=good.txt",
    "train:dataset.negative=bad.txt",
    "train:dataset.split_seed=4",
]
GSM8K = [
    *(f"experiments.{stage}=null" for stage in ("base", "reward")),
    *(f"experiments.{stage}={stage}_smollm2_gsm8k" for stage in ("sft", "ppo")),
    "train:dataset.path=questions.jsonl",
]
TLDR = [
    *(f"experiments.{stage}={stage}" for stage in ("sft", "reward", "ppo")),
    "train:model=smollm2_135m",
    "train:lora=lora",
    "train:dataset=tldr",
    "ppo:artifacts.publish=null",
]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(SENTIMENT, id="sentiment"),
        pytest.param(GSM8K, id="a reward function", marks=pytest.mark.slow),
        pytest.param(TLDR, id="a data set a stage, adapters", marks=pytest.mark.slow),
    ],
)
def test_the_evaluation_asks_what_ppo_was_trained_on_and_of_its_models(
    tmp_path: Path, words: list[str]
) -> None:
    folder = tmp_path / "it's a\\"
    pipeline_of = composed(*words, "collect=true", "collect:annotator=page")
    check_pipeline(pipeline_of)
    steps = {step.stage: step for step in plan(pipeline_of, folder)}
    assert not [w for s in steps.values() for w in s.command(folder) if "<pipeline>" in w]
    made = {}
    for name, entry in (("ppo", "train"), ("evaluate", "evaluate"), ("collect", "collect")):
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            made[name] = compose(entry, overrides=list(steps[name].overrides))
    check_evaluation(made["evaluate"])
    ppo, evaluation, collection = (plain(cfg) for cfg in made.values())
    assert ppo["dataset"]["name"] != "demo_seed1"
    assert evaluation["dataset"] == collection["dataset"] == ppo["dataset"]
    export = str(folder / "round_1/ppo/export")
    assert evaluation["policy"] == (ppo["artifacts"]["publish"] or export)
    assert evaluation["baseline"] == ppo["artifacts"]["sft"]
    assert collection["candidates"]["policies"]["sft"] == ppo["artifacts"]["sft"]
    assert evaluation["gates"] == (ppo["gates"] or {})
    assert evaluation["prompts"]["max_length"] == ppo["data"]["max_prompt_length"]
    assert collection["candidates"]["max_prompt_length"] == ppo["data"]["max_prompt_length"]
    for key in ("gold", "num_prompts", "max_new_tokens"):
        assert evaluation["evaluation"][key] == ppo["evaluation"][key]
    if ppo["lora"] is None:
        assert evaluation["scorer"] == ppo["scorer"]
    else:  # the reward model is exported with its adapter merged
        assert evaluation["scorer"]["source"] == ppo["artifacts"]["reward"]


def test_a_mistake_in_a_stage_s_words_is_answered_before_anything_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_lightning.pipeline", "ppo:module.pp=3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert "error: round_1/ppo: unknown key module.pp; did you mean module.ppo" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_user_s_words_for_the_evaluation_win(tmp_path: Path) -> None:
    words = ["evaluate:dataset=questions", "evaluate:dataset.path=F", "evaluate:gates=none"]
    *_, step = plan(composed(*SENTIMENT, *words, "evaluate:prompts.max_length=99"), tmp_path)
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        cfg = compose("evaluate", overrides=list(step.overrides))
    assert cfg.dataset.source.path == "F"
    assert "positive" not in cfg.dataset
    assert cfg.prompts.max_length == 99
    assert not cfg.gates
    assert cfg.policy == str(tmp_path / "round_1/artifacts/smollm2_sentiment/ppo")
    *_, step = plan(composed("evaluation_gates=sft"), tmp_path)
    assert "gates=sft" in step.overrides
