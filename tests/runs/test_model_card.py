import pytest

from rlhf_lightning.runs.model_card import write_model_card

NORMALIZED = "mean 0 and standard deviation 1"


@pytest.mark.parametrize(("metrics", "said"), [({"reward/sample_std": 2.0}, True), ({}, False)])
def test_a_reward_models_card_says_that_it_is_normalized_only_if_it_is(tmp_path, metrics, said):
    path = write_model_card(
        tmp_path, stage="reward", base="sft", data="world", run="run", metrics=metrics, gates=()
    )
    assert (NORMALIZED in path.read_text()) is said
    assert "Trained from: sft" in path.read_text()


def test_the_card_of_a_model_from_scratch_does_not_call_it_fine_tuned(tmp_path):
    path = write_model_card(
        tmp_path, stage="sft", base=None, data="world", run="run", metrics={}, gates=()
    )
    assert "trained from random weights" in path.read_text()
    assert "fine-tuning" not in path.read_text()
