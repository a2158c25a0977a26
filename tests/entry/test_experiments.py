"""What holds between the keys of a composed experiment."""

import pytest
from hydra import compose, initialize_config_dir

from rlhf_lightning.app.config.compose import choices, conf_dir, register

PPO = [name for name in choices("experiment") if name.startswith("ppo")]


@pytest.fixture(autouse=True)
def _hydra():
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        yield


@pytest.mark.parametrize("experiment", PPO)
def test_a_policy_is_evaluated_with_room_for_the_answers_it_was_trained_to_give(experiment):
    cfg = compose("train", [f"+experiment={experiment}", "module.sampling.max_new_tokens=77"])
    assert cfg.evaluation.max_new_tokens == 77


@pytest.mark.parametrize("dataset", ["files", "hub", "sentiment"])
def test_another_seed_holds_out_the_same_prompts_as_the_stages_before(dataset):
    # Artefacts of these data sets do not have the seed in their path, so a run with another seed
    # starts from models that were trained with the first one's split.
    needed = {"files": ["dataset.path=x"], "hub": ["dataset.hub_name=x"], "sentiment": []}[dataset]
    needed += [] if dataset == "sentiment" else ["dataset.name=mine"]
    overrides = ["+experiment=ppo", f"dataset={dataset}", *needed]
    seeds = [compose("train", [*overrides, f"seed={n}"]).dataset.source.seed for n in (1, 2)]
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_gates_and_refusals_are_those_of_the_data_set(stage):
    built_in = compose("train", [f"+experiment={stage}"])
    assert built_in.gates
    assert (built_in.safety is None) == (stage == "reward")
    own = ["model=smollm2_135m", "dataset=tldr"]
    other = compose("train", [f"+experiment={stage}", *own])
    assert not other.gates
    assert other.safety is None
    none = compose("train", [f"+experiment={stage}", "gates=none", "safety=none"])
    assert not none.gates
    assert none.safety is None


def test_an_evaluation_takes_the_gates_of_its_data_set():
    gates = "gates=by_dataset/ppo"
    assert compose("evaluate", [gates]).gates == compose("train", ["+experiment=ppo"]).gates
    assert not compose("evaluate", [gates, "dataset=tldr"]).gates
