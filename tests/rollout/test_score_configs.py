"""Scorers by configuration: chosen by name, refused early, and the right one for the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import PlanGroup
from rlhf_lightning.app.plan import Plan
from rlhf_lightning.rollout.scorers.base import RewardModelScorer
from rlhf_lightning.rollout.scorers.hparams import (
    HttpScorerHparams,
    RewardEnsembleHparams,
    TextRewardModelHparams,
)
from rlhf_lightning.rollout.scorers.http import HttpScorer
from rlhf_lightning.rollout.scorers.text_reward_model import TextRewardModelScorer
from rlhf_lightning.text.tokenizers import check_same_tokenizer
from tests.builders.command_lines import settings_of
from tests.builders.models import tiny_scalar_model, tiny_tokenizer
from tests.rollout.reward_models import byte_tokenizer, save_reward_model

URL = "scorer.url=http://127.0.0.1:8000/score"


def scorer_of(*overrides):
    return settings_of("+experiment=ppo", *overrides).scorer.build()


def test_scorers_are_chosen_by_name_and_have_the_defaults_of_their_dataclasses(tmp_path):
    service = scorer_of("scorer=http", URL)
    assert isinstance(service, HttpScorer)
    assert service.hparams == HttpScorerHparams(url="http://127.0.0.1:8000/score")
    assert service.request == {"prompts": "prompts", "completions": "completions"}
    assert service.extra == {}
    folder = save_reward_model(tmp_path, "bert")
    classifier = scorer_of("scorer=text_reward_model", f"scorer.source={folder}")
    assert isinstance(classifier, TextRewardModelScorer)
    assert classifier.hparams == TextRewardModelHparams()
    several = scorer_of("scorer=reward_ensemble", "scorer.sources=[one,two]", "scorer.policy=null")
    assert several.hparams == RewardEnsembleHparams()
    (model,) = classifier.build()
    assert not model.training


@pytest.mark.parametrize(("experiment", "key"), [("ppo", "ppo"), ("grpo", "grpo"), ("dpo", "dpo")])
def test_a_reward_model_reads_as_many_rows_at_once_as_the_objective(experiment, key):
    words = [f"+experiment={experiment}", "scorer=text_reward_model", "scorer.source=x"]
    found = settings_of(*words, f"module.{key}.micro_batch_size=3")
    assert found.scorer.get("micro_batch_size") == 3


def test_what_a_service_is_sent_is_given_on_the_command_line():
    scorer = scorer_of(
        "scorer=http",
        URL,
        "scorer.request={query: texts, prompts: prompts}",
        "scorer.extra={model: {name: m}}",
        "scorer.response=rewards",
    )
    assert scorer.request == {"query": "texts", "prompts": "prompts"}
    assert json.dumps(scorer.extra) == '{"model": {"name": "m"}}', "OmegaConf's dicts are no JSON"
    assert scorer.path == ("rewards",)


def test_the_scorers_of_a_sum_are_checked_too():
    target = "rlhf_lightning.rollout.scorers.http.HttpScorer"
    both = f"{{http: {{_target_: {target}, url: 'http://h/', max_retries: -1}}}}"
    total = "scorer._target_=rlhf_lightning.rollout.scorers.base.WeightedScorer"
    with pytest.raises(ConfigError, match="max_retries=-1 must be >= 0"):
        settings_of("+experiment=ppo", "scorer=none", f"+{total}", f"+scorer.scorers={both}")


def test_a_scorer_of_ones_own_says_its_ranges_and_what_it_holds(tmp_path, monkeypatch):
    (tmp_path / "brought_scorer.py").write_text(
        "from dataclasses import dataclass\n"
        "from rlhf_lightning.arguments import Count\n"
        "from rlhf_lightning.hparams import Checked\n"
        "from rlhf_lightning.rollout.scorers.base import Responses, Scores\n"
        "@dataclass(frozen=True)\n"
        "class BroughtHparams(Checked):\n"
        "    window: Count = 3\n"
        "class Brought:\n"
        "    Hparams, holds = BroughtHparams, 'adapter'\n"
        "    def __init__(self, **hparams): ...\n"
        "    def build(self, base=None) -> list: return []\n"
        "    def __call__(self, responses: Responses) -> Scores: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "brought_scorer.")
    words = ["+experiment=ppo", "scorer=none", "+scorer._target_=brought_scorer.Brought"]
    with pytest.raises(ConfigError, match=r"scorer\.window=0 must be >= 1"):
        settings_of(*words, "+scorer.window=0")
    settings = settings_of(*words, "+scorer.window=2")
    plan = PlanGroup(device_memory="80GiB", device="cpu")
    assert Plan(settings, plan).models["reward adapters"] > 0
    with pytest.raises(ConfigError, match="needs the base"):
        settings_of("+experiment=dpo", *words[1:])


def save_tokenizer(folder: Path, tokenizer) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


def test_a_packed_reward_model_needs_the_policys_tokenizer(tmp_path):
    policy = save_tokenizer(tmp_path / "policy", tiny_tokenizer())
    other = save_tokenizer(tmp_path / "other", byte_tokenizer())
    with pytest.raises(ValueError, match="another tokenizer than the policy") as caught:
        scorer_of(f"artifacts.sft={policy}", f"artifacts.reward={other}")
    message = str(caught.value)
    assert "48 tokens differ, '<pad>' has id 0 of the policy's and 259 there" in (message)
    assert f"use scorer=text_reward_model scorer.source={other}" in message
    same = scorer_of(f"artifacts.sft={policy}", f"artifacts.reward={tmp_path}/policy/.")
    assert isinstance(same, RewardModelScorer)


def test_an_end_of_text_of_another_name_is_refused(tmp_path):
    other = tiny_tokenizer()
    other.eos_token = "w9"
    with pytest.raises(ValueError, match=r"ends texts with 'w9' .* the policy with '<eos>' .*fix"):
        check_same_tokenizer(tiny_tokenizer(), save_tokenizer(tmp_path, other), fix="the fix")


def test_a_token_that_the_reward_model_does_not_know_is_refused(tmp_path):
    policy = tiny_tokenizer()
    policy.add_tokens(["w48"])
    with pytest.raises(ValueError, match=r"1 tokens differ, 'w48' has id 48 .* and None"):
        check_same_tokenizer(policy, save_tokenizer(tmp_path, tiny_tokenizer()), fix="")


def test_a_reward_model_without_a_tokenizer_cannot_be_compared(tmp_path):
    policy = save_tokenizer(tmp_path / "policy", tiny_tokenizer())
    with pytest.raises(ValueError, match=r"has no tokenizer .* save its tokenizer there"):
        RewardModelScorer(tiny_scalar_model, policy=policy, source=tmp_path)
