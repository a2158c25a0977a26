"""What a sweep maximises."""

from rlhf_lightning.app.stages.spec import find_stage
from rlhf_lightning.app.train import objective
from rlhf_lightning.runs.summary import Summary


def test_gold_never_chooses_a_setting():
    metrics = {"val/gold_win_rate": 0.9, "val/score_win_rate": 0.0, "val/loss": 2.0}
    assert objective(Summary("ppo", "completed", 1, metrics), find_stage("ppo")) == 0.0


def test_a_reward_model_is_chosen_by_its_accuracy_and_nothing_measured_is_none():
    assert (
        objective(Summary("reward", "completed", 1, {"val/accuracy": 0.8}), find_stage("reward"))
        == 0.8
    )
    assert objective(Summary("reward", "completed", 1, {}), find_stage("reward")) is None
