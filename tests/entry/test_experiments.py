"""What holds between the keys of a composed experiment."""

import pytest

from tests.builders.command_lines import settings_of


def test_another_seed_holds_out_the_same_prompts_as_the_stages_before():
    # Artefacts of these data sets do not have the seed in their path, so a run with another seed
    # starts from models that were trained with the first one's split.
    for chosen in ("dataset=files dataset.path=x", "dataset=hub dataset.hub_name=x"):
        words = ["+experiment=ppo", *chosen.split(), "dataset.name=mine"]
        seeds = [settings_of(*words, f"seed={n}").dataset.source.get("seed") for n in (1, 2)]
        assert seeds[0] is not None
        assert seeds[0] == seeds[1]


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["reward", "ppo"])
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
