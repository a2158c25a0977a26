"""GRPO and its relatives from the command line: what composes, what is said, what is planned."""

from __future__ import annotations

import warnings

import pytest

from tests.builders.command_lines import settings_of

# baseline, scale, surrogate, reduction, place of the KL: what each paper has.
PUBLISHED = {
    "grpo": ("mean", "group_std", "ppo", "token", "loss"),
    "rloo": ("leave_one_out", "none", "ppo", "constant", "reward"),
    "dr_grpo": ("mean", "none", "ppo", "constant", "loss"),
    "reinforce_pp": ("none", "global_std", "ppo", "token", "reward"),
    "gspo": ("mean", "group_std", "gspo", "sequence", "loss"),
    "cispo": ("mean", "group_std", "cispo", "token", "loss"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("experiment", PUBLISHED)
def test_an_experiment_composes_without_a_warning_into_what_it_is_called(experiment):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = settings_of(f"+experiment={experiment}")
    own = settings.hparams
    found = (own.baseline, own.scale, own.surrogate, own.loss_reduction, own.kl_in)
    assert found == PUBLISHED[experiment]
    assert settings.stage == "grpo"
    assert settings.name.endswith(experiment) or experiment == "grpo"
    assert settings.data.num_generations == (1 if experiment == "reinforce_pp" else 8)
    ppo = settings_of("+experiment=ppo")
    assert settings.data.num_rows == ppo.data.num_rows, "as many responses as PPO's, to compare"
    assert settings.artifacts.publish != ppo.artifacts.publish


TITLES = {
    "grpo": "GRPO", "rloo": "RLOO", "dr_grpo": "Dr. GRPO", "reinforce_pp": "REINFORCE++",
    "gspo": "GSPO", "cispo": "CISPO", "ppo": "PPO", "sao": "SAO",
}  # fmt: skip


@pytest.mark.thorough
def test_pages_and_cards_call_an_objective_as_its_paper_does():
    found = {name: settings_of(f"+experiment={name}").title for name in TITLES}
    assert found == TITLES
