"""What a sweep maximises."""

from rlhf_lightning import PPOModule, RewardModule
from rlhf_lightning.app.train import objective
from rlhf_lightning.runs.summary import Summary


def test_gold_never_chooses_a_setting():
    metrics = {"val/gold_win_rate": 0.9, "val/score_win_rate": 0.0, "val/loss": 2.0}
    assert objective(Summary("ppo", "completed", 1, metrics), PPOModule) == 0.0


def test_a_reward_model_is_chosen_by_its_accuracy_and_what_is_no_number_is_none():
    # Optuna ends the search at a NaN, and takes None for one failed trial.
    for accuracy, value in ((0.8, 0.8), (float("nan"), None), (float("inf"), None)):
        summary = Summary("reward", "completed", 1, {"val/accuracy": accuracy})
        assert objective(summary, RewardModule) == value
    assert objective(Summary("reward", "completed", 1, {}), RewardModule) is None
