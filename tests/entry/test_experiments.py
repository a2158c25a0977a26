"""What holds between the keys of a composed experiment."""

import pytest

from rlhf_lightning.app.config.compose import ConfigError
from tests.builders.command_lines import settings_of


@pytest.mark.parametrize("dataset", ["files", "hub"])
def test_another_seed_holds_out_the_same_prompts_as_the_stages_before(dataset):
    # Artefacts of these data sets do not have the seed in their path, so a run with another seed
    # starts from models that were trained with the first one's split.
    needed = {"files": "dataset.path=x", "hub": "dataset.hub_name=x"}[dataset]
    overrides = ["+experiment=ppo", f"dataset={dataset}", needed, "dataset.name=mine"]
    seeds = [settings_of(*overrides, f"seed={n}").dataset.source.get("seed") for n in (1, 2)]
    assert seeds[0] is not None
    assert seeds[0] == seeds[1]


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_gates_and_refusals_are_those_of_the_data_set(stage):
    built_in = settings_of(f"+experiment={stage}")
    assert built_in.gates
    assert (built_in.safety is None) == (stage == "reward")
    own = ["model=smollm2_135m", "dataset=tldr"]
    other = settings_of(f"+experiment={stage}", *own)
    assert not other.gates
    assert other.safety is None
    none = settings_of(f"+experiment={stage}", "gates=none", "safety=none")
    assert not none.gates
    assert none.safety is None


@pytest.mark.parametrize(
    ("experiment", "override", "wanted"),
    [
        ("kto", "data.kind=preferences", "data.kind=unpaired"),
        ("dpo", "module.dpo.desirable_weight=2", "kind=kto alone"),
    ],
)
def test_objective_and_rows_of_dpo_go_together(experiment, override, wanted):
    with pytest.raises(ConfigError, match=wanted):
        settings_of(f"+experiment={experiment}", override)
