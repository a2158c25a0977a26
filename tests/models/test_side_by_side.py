"""Policy and value model beside each other: the bits of half as many threads in turn."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlhf_lightning.distributed.process import cpu_threads
from rlhf_lightning.models.cpu_kernels import cpu_kernels, side_by_side
from tests.builders.models import tiny_policy, tiny_scalar_model
from tests.builders.stages import fit, ppo_hparams, tiny_module


def trained(count, *, precision, beside):
    """Two iterations of PPO by `count` threads."""
    with cpu_threads(count), pytest.MonkeyPatch.context() as patched:
        used = []

        def counted(*models):
            found = side_by_side(*models) if beside else None
            used.append(found is not None)
            return found

        for user in ("rlhf_lightning.modules.optimization", "rlhf_lightning.models.forward"):
            patched.setattr(f"{user}.side_by_side", counted)
        module = tiny_module("llama", ppo=ppo_hparams(num_minibatches=2, micro_batch_size=3))
        fit(module, 2, precision=precision)
        assert set(used) == {beside}
        assert torch.get_num_threads() == count
    return module


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_models_beside_each_other_have_the_bits_of_one_after_the_other(precision):
    together = trained(2, precision=precision, beside=True)
    in_turn = trained(1, precision=precision, beside=False)
    assert torch.equal(together.rollouts[0].logprobs, together.rollouts[0].ref_logprobs)
    assert together.steps[0]["ppo/approx_kl"] == 0
    assert together.steps[1]["ppo/approx_kl"] > 0
    for ours, theirs in zip(together.parameters(), in_turn.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(together.rollouts, in_turn.rollouts, strict=True):
        for name in ("sequences", "logprobs", "ref_logprobs", "values", "entropy", "advantages"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert together.steps == in_turn.steps


def test_models_take_turns_where_they_could_not_be_told_apart_from_one():
    policy, value = tiny_policy("llama"), tiny_scalar_model("llama")
    with cpu_threads(2):
        assert side_by_side(policy, value) is not None
        assert side_by_side(policy, policy) is None, "a model beside itself"
        with FlopCounterMode(display=False):
            assert side_by_side(policy, value) is None, "a mode that sees its own thread alone"
        with cpu_kernels(False):
            assert side_by_side(policy, value) is None, "switched off"
        value.head.weight = policy.model.lm_head.weight
        assert side_by_side(policy, value) is None, "a weight of both"
        assert side_by_side(policy, tiny_scalar_model("llama").to("meta")) is None, "not on a CPU"
    with cpu_threads(1):
        assert side_by_side(policy, tiny_scalar_model("llama")) is None, "one thread"
