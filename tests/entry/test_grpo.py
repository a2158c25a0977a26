"""GRPO and its relatives from the command line: what composes, what is said, what is planned."""

from __future__ import annotations

import json
import re
import warnings

import pytest

from rlhf_lightning.app.config.settings import PlanSettings
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.plan import Plan
from rlhf_lightning.app.run_summary import batch_arithmetic
from rlhf_lightning.modules.grpo import PolicyGradientModule
from rlhf_lightning.runs.folder import read_metrics
from tests.builders.command_lines import settings_of
from tests.builders.runs import completed, settings_for

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
    own = type("Own", (PolicyGradientModule,), {"title": "my objective"})
    assert own.title_of(settings_of("+experiment=rloo").hparams) == "my objective"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "5 iterations of 4 prompts x 3 responses = 12 rows; on each 2 x 2 minibatches of 6 "),
        (["data.num_generations=1", "module.grpo.baseline=none", "module.grpo.scale=none"],
         "5 iterations of 4 prompts; on each 2 x 2 minibatches of 2 rows"),
    ],
)  # fmt: skip
def test_the_start_says_prompts_times_responses(start, overrides, said):
    settings = settings_for("grpo", start, "module.grpo.num_minibatches=2", *overrides)
    assert said in batch_arithmetic(settings, 5, 1)
    assert "6 a process" in batch_arithmetic(settings_for("grpo", start), 5, 2)


def plan(*overrides: str) -> Plan:
    words = [*overrides, "++plan.device=cpu", "module.sampling.max_new_tokens=16"]
    settings = load_settings(PlanSettings, "train", words)
    return Plan(settings, settings.plan)


def test_the_plan_has_no_value_model_and_takes_less_than_ppo_at_the_same_rows():
    from rlhf_lightning.app.config.compose import register

    register()
    ppo, grpo = (plan(f"+experiment={name}") for name in ("ppo", "grpo"))
    optimizers = [planned.phases["update"]["optimizer"] for planned in (grpo, ppo)]
    assert optimizers[0] < 0.6 * optimizers[1]
    assert "value model" in ppo.models
    assert set(grpo.models) == {"policy", "reference", "reward models"}
    assert grpo.total < ppo.total


@pytest.mark.timeout(200)
def test_a_run_ends_with_a_report_a_model_and_no_value_model(
    working_folder, start, tmp_path, capsys
):
    own = ["artifacts.reward=null", f"artifacts.publish={tmp_path}/model"]
    folder = completed(tmp_path / "run", "grpo", start, *own)
    said = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    assert "4 prompts x 3 responses = 12 rows" in said
    assert "critic: no value model" in said, "what the doctor does not look at"
    assert said.count("value model") == 1
    summary = json.loads(folder.summary.read_text())
    assert (summary["stage"], summary["status"]) == ("grpo", "completed")
    page = folder.report.read_text()
    assert "GRPO" in page
    assert page.lower().count("value model") == page.lower().count("no value model") == 1
    names = [file.name for file in (tmp_path / "model").rglob("*")]
    assert "model.safetensors" in names
    assert not [name for name in names if "value" in name]
    rows = read_metrics(folder.metrics)
    assert rows[0]["rollout/kl_per_response"] == 0
    assert not [name for row in rows for name in row if "value" in name]
