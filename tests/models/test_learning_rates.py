"""Learning rates that follow the size of a model, where none is set."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.models.learning_rates import TABLE, default_learning_rate
from rlhf_lightning.modules.optimization import parameter_group

KINDS = ("sft", "reward", "policy", "value")


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_between_two_rows_have_rates_between_theirs(kind):
    for low, high in pairwise(TABLE):
        middle = round((low.num_parameters * high.num_parameters) ** 0.5)
        rate = default_learning_rate(kind, middle, lora=False)
        mean = (getattr(low, kind) * getattr(high, kind)) ** 0.5
        assert rate == pytest.approx(mean, rel=0.05), "two digits of the geometric mean"


def test_beyond_the_table_the_rate_stays_that_of_its_end():
    for kind in KINDS:
        assert default_learning_rate(kind, 1, lora=False) == getattr(TABLE[0], kind)
        assert default_learning_rate(kind, 10**12, lora=False) == getattr(TABLE[-1], kind)
    with pytest.raises(ValueError, match="num_parameters=0 must be at least 1"):
        default_learning_rate("sft", 0, lora=False)


def test_a_module_without_a_rate_takes_that_of_its_own_model(start):
    policy, reward = load_policy(start), load_scalar_model(start, head="reward")
    adapted = load_policy(start, lora=LoraHparams())
    tiny = TABLE[0]  # smaller than its model
    assert parameter_group(policy, "sft", None)["lr"] == tiny.sft
    assert parameter_group(reward, "reward", None)["lr"] == tiny.reward
    assert parameter_group(adapted, "policy", None)["lr"] == pytest.approx(10 * tiny.policy)
    assert parameter_group(policy, "sft", 7e-4)["lr"] == 7e-4
    assert len(parameter_group(policy, "sft", None)["params"]) == len(list(policy.parameters()))
