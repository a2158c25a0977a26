from __future__ import annotations

import pytest
import torch

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.callbacks.exact_resume import reward_digests
from rlhf_lightning.rollout.scorers.hparams import RewardEnsembleHparams
from rlhf_lightning.rollout.scorers.reward_models import RewardEnsembleScorer, combined
from tests.builders.command_lines import settings_of
from tests.builders.models import EOS, PAD, prompt_batch, tiny_scalar_model
from tests.rollout.answers import responses_of

SCORES = torch.tensor([[1.0, 4.0], [3.0, 4.0], [5.0, 1.0]])


def ensemble(**options) -> RewardEnsembleScorer:
    biases = {"a": 0.0, "b": 2.0, "c": 4.0}
    return RewardEnsembleScorer(
        lambda source: tiny_scalar_model("llama", bias=biases[source]), list(biases), **options
    )


def answers():
    return responses_of(prompt_batch([[3, 4, 5], [6]]), [[7, 8, EOS], [9, PAD, 9, 10]])


def test_disagreement_costs_its_standard_deviation_times_the_coefficient():
    total, std = combined(SCORES, RewardEnsembleHparams(std_coef=2.0))
    torch.testing.assert_close(std, torch.tensor([(8 / 3) ** 0.5, 2**0.5]))
    torch.testing.assert_close(total, torch.tensor([3.0, 3.0]) - 2 * std)


def test_the_minimum_is_the_lowest_member_and_coefficient_0_the_plain_mean():
    total, _ = combined(SCORES, RewardEnsembleHparams(combine="minimum"))
    assert total.tolist() == [1.0, 1.0]
    assert combined(SCORES, RewardEnsembleHparams(std_coef=0.0))[0].tolist() == [3.0, 3.0]


def test_members_are_loaded_once_each_and_their_scores_are_components():
    scorer = ensemble(std_coef=0.5, micro_batch_size=1)
    models = scorer.build()
    assert len(models) == 3
    assert scorer.build() == models
    assert not any(p.requires_grad for model in models for p in model.parameters())
    got = scorer(answers())
    assert sorted(got.components) == [
        "disagreement",
        "reward_model_1",
        "reward_model_2",
        "reward_model_3",
    ]
    first = got.components["reward_model_1"]
    torch.testing.assert_close(got.components["reward_model_3"], first + 4)
    std = (8 / 3) ** 0.5
    torch.testing.assert_close(got.components["disagreement"], torch.full((2,), std))
    torch.testing.assert_close(got.total, first + 2 - 0.5 * std)


ENSEMBLE = ("+experiment=ppo", "scorer=reward_ensemble")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scorer.sources=[a,a]"], "an ensemble needs two or more different reward models"),
        (["scorer.sources=a"], r"scorer\.sources='a' is str, expected a list"),
    ],
)
def test_an_ensemble_that_cannot_work_is_refused_before_anything_runs(overrides, message):
    with pytest.raises(ConfigError, match=message):
        settings_of(*ENSEMBLE, *overrides)


def test_a_member_that_changes_under_a_run_is_noticed(tmp_path):
    # What is no folder counts by its name.
    members = RewardEnsembleScorer(tiny_scalar_model, ["org/one", "org/two"])
    assert reward_digests(members) == {"org/one": "org/one", "org/two": "org/two"}
