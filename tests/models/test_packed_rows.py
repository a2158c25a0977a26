"""Rows of different lengths in one sequence: the numbers and gradients of rows alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.building import checkpoint_activations
from rlhf_lightning.models.cpu import llama_layer, weight_grads
from rlhf_lightning.models.cpu.row_blocks import DECODERS
from rlhf_lightning.models.cpu_kernels import cpu_kernels
from rlhf_lightning.models.forward import pack_together, packs, sequence_scores
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.lora import AdaptedBase, add_policy
from rlhf_lightning.models.micro_batching import micro_batching
from rlhf_lightning.modules.sft import SFTModule
from tests.builders.models import (
    EOS,
    MODEL_TYPES,
    flat_gradients,
    prompt_rows,
    tiny_policy,
    tiny_scalar_model,
)
from tests.builders.stages import preference_batch, sft_batch, tiny_reward, tiny_sft

# Of two length buckets, with one row of a single token, and two rows of one length.
ROWS = prompt_rows([5, 20, 1, 31, 9, 20], seed=3)


def padded(rows: list[list[int]], *, left: bool = False) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows)) + 2
    gaps = [[EOS] * (width - len(row)) for row in rows]
    ids = [(gap + row) if left else (row + gap) for gap, row in zip(gaps, rows, strict=True)]
    mask = [
        ([0] * len(gap) + [1] * len(row)) if left else ([1] * len(row) + [0] * len(gap))
        for gap, row in zip(gaps, rows, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask).bool()


def packed_logprobs(policy: PolicyModel, rows: list[list[int]], bf16: bool = False) -> Tensor:
    """Return the log-probabilities of every token but each row's first."""
    ids, mask = padded(rows)
    together = pack_together(ids, mask)
    row, column = mask[:, 1:].nonzero(as_tuple=True)
    positions = together.offsets[row] + column
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
        return policy(
            together.input_ids, positions, ids[row, column + 1], 1.0, False, together.row_lengths
        ).logprobs


def logprobs_alone(policy: PolicyModel, rows: list[list[int]], bf16: bool = False) -> Tensor:
    found = []
    for row in rows:
        ids = torch.tensor([row])
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
            positions = torch.arange(len(row) - 1)
            found.append(policy(ids, positions, ids[0, 1:], 1.0, False).logprobs)
    return torch.cat(found)


def gradients(policy: PolicyModel, logprobs: Tensor) -> Tensor:
    policy.zero_grad()
    (logprobs * torch.sin(torch.arange(len(logprobs)))).sum().backward()
    return flat_gradients(policy)


@pytest.mark.parametrize("model_type", DECODERS)
def test_logprobs_and_gradients_of_packed_rows_are_those_of_rows_alone(model_type):
    policy = tiny_policy(model_type)
    assert packs(policy)
    alone, packed = logprobs_alone(policy, ROWS), packed_logprobs(policy, ROWS)
    assert alone.std() > 0.5
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    expected = gradients(policy, alone)
    got = gradients(policy, packed)
    assert float((got - expected).norm()) < 1e-5 * float(expected.norm())


@pytest.mark.parametrize("instruction", [False, True])
@pytest.mark.parametrize("model_type", DECODERS)
def test_in_bf16_packed_rows_are_as_near_to_fp32_as_rows_alone(
    model_type, instruction, monkeypatch
):
    # Both ways of a product, whatever the processor of this machine.
    monkeypatch.setattr(weight_grads, "multiplies_bf16", lambda: instruction)
    policy = tiny_policy(model_type)
    exact = gradients(policy, logprobs_alone(policy, ROWS))
    usual = gradients(policy, logprobs_alone(policy, ROWS, bf16=True))
    got = gradients(policy, packed_logprobs(policy, ROWS, bf16=True))
    assert 0 < float((got - exact).norm()) < 1.2 * float((usual - exact).norm())


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("model_type", DECODERS)
def test_scores_of_packed_rows_are_those_of_rows_alone_padded_on_either_side(model_type, left):
    model = tiny_scalar_model(model_type, bias=0.25)
    with torch.no_grad():
        packed = sequence_scores(model, *padded(ROWS, left=left), packed=True)
        alone = [
            sequence_scores(model, torch.tensor([row]), torch.ones(1, len(row)).bool())
            for row in ROWS
        ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-5)
    assert packed.std() > 0.1


def test_checkpointed_layers_and_long_rows_keep_packed_rows_apart(monkeypatch):
    policy = tiny_policy("llama")
    expected = gradients(policy, logprobs_alone(policy, ROWS))
    checkpoint_activations(policy.model)
    got = gradients(policy, packed_logprobs(policy, ROWS))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    # Longer than the layer that is written out takes: the plain layer.
    monkeypatch.setattr(llama_layer, "LONGEST", 16)
    got = gradients(policy, packed_logprobs(policy, ROWS))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bf16", [False, True])
def test_adapters_see_packed_rows_as_rows_alone(bf16):
    base = AdaptedBase(tiny_policy("llama").model, LoraHparams(r=2))
    policy = add_policy(base, "policy", seed=0)
    for parameter in policy.parameters():
        nn.init.normal_(parameter, std=0.2)
    assert packs(policy)
    alone = logprobs_alone(policy, ROWS, bf16)
    packed = packed_logprobs(policy, ROWS, bf16)
    expected, got = gradients(policy, alone), gradients(policy, packed)
    assert expected.norm() > 1
    assert float((got - expected).norm() / expected.norm()) < (0.1 if bf16 else 1e-5)


def test_what_cannot_keep_rows_apart_is_not_packed():
    for model_type in set(MODEL_TYPES) - set(DECODERS):
        assert not packs(tiny_policy(model_type))
    windows: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 0}
    assert not packs(tiny_policy("qwen2", sliding_window=8, **windows))
    eager = tiny_policy("llama")
    eager.model.set_attn_implementation("eager")
    assert not packs(eager)
    assert not packs(tiny_policy("llama").to("meta"))
    with cpu_kernels(False):
        assert not packs(tiny_policy("llama"))
    with micro_batching("buckets"):
        assert not packs(tiny_policy("llama"))
    assert packs(tiny_policy("llama"))


def loss_and_gradient(module: Any, loss: Tensor, model: ScalarHeadModel | PolicyModel) -> Any:
    model.zero_grad()
    loss.backward()
    return float(loss.detach()), flat_gradients(model)


def test_losses_of_sft_and_reward_model_do_not_depend_on_packing():
    sft, reward = tiny_sft("llama"), tiny_reward("llama")
    batch, pairs = sft_batch(), preference_batch()
    for module in (sft, reward):
        module.configure_model()

    def both() -> list[Any]:
        scores = reward.scores(pairs)
        return [
            loss_and_gradient(sft, SFTModule.loss(sft, batch, batch.loss_mask.sum()), sft.policy),
            loss_and_gradient(reward, (scores[0] - scores[1]).sigmoid().sum(), reward.model),
        ]

    packed = both()
    with micro_batching("buckets"):
        apart = both()
    for got, expected in zip(packed, apart, strict=True):
        assert got[0] == pytest.approx(expected[0], abs=1e-5)
        assert float((got[1] - expected[1]).norm() / expected[1].norm()) < 1e-5
