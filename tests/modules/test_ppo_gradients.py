"""What the gradient of one optimizer step depends on, and what it must not depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.functional.sequences import response_mask
from rlhf_lightning.hparams import UnusualHparamWarning
from rlhf_lightning.models.forward import BUCKET, micro_batches, pack
from rlhf_lightning.models.micro_batching import micro_batching
from rlhf_lightning.rollout.generators import base as generate
from tests.builders.models import EOS, PAD, flat_gradients
from tests.builders.stages import (
    STOPS,
    after_some_training,
    built,
    counts_of,
    loss_and_gradients,
    ppo_hparams,
    prompts,
    rollout_of,
    tiny_module,
)

GRADIENT = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def module():
    return built(tiny_module(ppo=ppo_hparams(entropy_coef=0.01, kl_in="loss")))


@pytest.fixture(scope="module")
def rollout(module) -> RolloutBatch:
    return after_some_training(rollout_of(module))


@pytest.fixture(scope="module")
def expected(module, rollout):
    loss, policy, value = loss_and_gradients(module, rollout)
    assert policy.abs().max() > 1e-2
    assert value.abs().max() > 1e-2
    return loss, policy, value


def assert_same(got, expected) -> None:
    assert got[0] == pytest.approx(expected[0], abs=1e-6)
    torch.testing.assert_close(got[1], expected[1], **GRADIENT)
    torch.testing.assert_close(got[2], expected[2], **GRADIENT)


def test_responses_end_in_every_possible_way(rollout):
    lengths = rollout.response_mask.sum(-1)
    assert lengths.min() == 1
    assert lengths.unique().numel() > 4
    assert set(rollout.finish_reason.tolist()) == {0, 1}


def pad_columns(batch: RolloutBatch, left: int, right: int, fill: int) -> RolloutBatch:
    def widened(x: torch.Tensor, left: int, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(x, (left, right), value=value)

    names = ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns", "entropy")
    names += ("sampler_logprobs",)
    return replace(
        batch,
        sequences=widened(batch.sequences, left, fill),
        attention_mask=widened(batch.attention_mask, left, False),
        response_mask=widened(batch.response_mask, 0, False),
        prompt_length=batch.prompt_length + left,
        # What stands off the mask must not matter, so it is garbage here.
        **{name: widened(getattr(batch, name), 0, 37.0) for name in names},
    )


@pytest.mark.parametrize(("left", "right", "fill"), [(5, 0, PAD), (0, 4, EOS), (7, 3, 9)])
def test_extra_padding_columns_change_no_gradient(module, rollout, expected, left, right, fill):
    assert_same(loss_and_gradients(module, pad_columns(rollout, left, right, fill)), expected)


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_the_gradient_does_not_depend_on_the_micro_batches(
    module, rollout, expected, micro_batch_size
):
    got = loss_and_gradients(module, rollout, micro_batch_size=micro_batch_size)
    assert_same(got, expected)


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_micro_batches_by_tokens_have_the_gradient_of_exact_buckets(micro_batch_size):
    exact = built(tiny_module(ppo=ppo_hparams(entropy_coef=0.01, kl_in="loss"))).double()
    rollout = after_some_training(rollout_of(exact))
    expected = loss_and_gradients(exact, rollout, micro_batch_size=micro_batch_size)
    with micro_batching("tokens"):
        parts = micro_batches(rollout.attention_mask, micro_batch_size)
        got = loss_and_gradients(exact, rollout, micro_batch_size=micro_batch_size)
    lengths = (rollout.attention_mask.sum(-1) - 1) // BUCKET
    assert any(len(lengths[rows].unique()) > 1 for rows in parts), "each is a bucket anyway"
    for one, other in zip(got[1:], expected[1:], strict=True):
        assert one.dtype == torch.float64
        assert one.abs().max() > 1e-2
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_mean_of_micro_batch_means_would_be_another_gradient(module, rollout, expected):
    # The mutation of the test above: each micro-batch divided by its own tokens.
    module.zero_grad()
    for rows in torch.arange(16).split(4):
        part = rollout[rows]
        for term in module.loss_terms(0, 0):
            loss, _ = term(part, counts_of(part))
            (loss / 4).backward()
    got = flat_gradients(module.policy)
    assert (got - expected[1]).norm() / expected[1].norm() > 0.03


def test_the_order_of_the_rows_changes_no_gradient(module, rollout, expected):
    order = torch.randperm(len(rollout), generator=torch.Generator().manual_seed(1))
    assert_same(loss_and_gradients(module, rollout[order]), expected)


def test_advantages_of_0_give_a_policy_gradient_of_exactly_0():
    plain = built(tiny_module())
    rollout = after_some_training(rollout_of(plain))
    flat = replace(rollout, advantages=torch.zeros_like(rollout.advantages))
    _, policy, value = loss_and_gradients(plain, flat)
    assert (policy == 0).all()
    assert value.abs().max() > 1e-2


def test_the_critic_gets_no_gradient_from_the_policy_loss():
    with pytest.warns(UnusualHparamWarning, match="vf_coef"):
        hparams = ppo_hparams(vf_coef=0.0)
    policy_only = built(tiny_module(ppo=hparams))
    rollout = after_some_training(rollout_of(policy_only))
    _, policy, value = loss_and_gradients(policy_only, rollout)
    assert policy.abs().max() > 1e-2
    assert (value == 0).all()


def test_a_critic_warmup_moves_the_value_model_alone():
    warm = built(tiny_module(ppo=ppo_hparams(critic_warmup_iterations=1)))
    rollout = after_some_training(rollout_of(warm))
    _, policy, value = loss_and_gradients(warm, rollout)
    assert (policy == 0).all()
    assert value.abs().max() > 1e-2
    warm.zero_grad()
    for term in warm.loss_terms(1, 0):
        loss, _ = term(rollout, counts_of(rollout))
        loss.backward()
    assert flat_gradients(warm.policy).abs().max() > 1e-2


def state_gradients(module, rollout: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |d loss / d last hidden state| summed over H, [b, W], of policy and value model.

    The head reads these states and nothing else, so this is where d loss / d logits is not 0.
    """
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str):
        def hook(_module, _inputs, output) -> None:
            kept[name] = output.last_hidden_state
            kept[name].retain_grad()

        return hook

    handles = [
        module.policy.model.base_model.register_forward_hook(keep("policy")),
        module.value.trunk.register_forward_hook(keep("value")),
    ]
    module.zero_grad()
    for term in module.loss_terms(0, 0):
        loss, _ = term(rollout, counts_of(rollout))
        loss.backward()
    for handle in handles:
        handle.remove()
    policy, value = (kept[name].grad.abs().sum(-1)[: len(rollout)] for name in ("policy", "value"))
    return policy, value


def actions_by_stop(rollout: RolloutBatch) -> torch.Tensor:
    """Count each row's actions from the sampled ids alone: up to and with the first stop."""
    counts = []
    for ids, finished in zip(rollout.response_tensors.tolist(), rollout.finish_reason, strict=True):
        stop = next((i for i, token in enumerate(ids) if token in STOPS), None)
        counts.append(len(ids) if stop is None or finished == 1 else stop + 1)
    return torch.tensor(counts)


def assert_gradient_exactly_on_actions(module, rollout: RolloutBatch) -> None:
    """C6: zero at prompt, padding and after EOS; not zero at every action, EOS included."""
    same_bucket = rollout.attention_mask.sum(-1) <= BUCKET
    for part in (rollout[same_bucket], rollout[~same_bucket]):
        counts = actions_by_stop(part)
        prompt_length = part.attention_mask[:, : part.prompt_length].sum(-1)
        width = pack(part).input_ids.shape[1]
        columns = torch.arange(width)
        first = (prompt_length - 1)[:, None]
        wanted = (columns >= first) & (columns < first + counts[:, None])
        for gradient in state_gradients(module, part):
            assert torch.equal(gradient > 1e-7, wanted)
            assert (gradient[~wanted] == 0).all()


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("pad", [PAD, EOS])
def test_there_is_a_gradient_at_every_action_and_nowhere_else(model_type, pad):
    plain = built(tiny_module(model_type, pad=pad))
    rollout = rollout_of(plain, prompts(pad=pad))
    assert_gradient_exactly_on_actions(plain, rollout)


def test_a_mask_that_drops_the_eos_does_not_pass_the_check_of_the_actions(monkeypatch):
    def without_eos(responses, stop_ids):
        stops = torch.isin(responses, torch.tensor(list(stop_ids)))
        return response_mask(responses, stop_ids) & ~stops

    monkeypatch.setattr(generate, "response_mask", without_eos)
    plain = built(tiny_module())
    with pytest.raises(AssertionError):
        assert_gradient_exactly_on_actions(plain, rollout_of(plain))
