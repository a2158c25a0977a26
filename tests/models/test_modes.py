"""Dropout is on where a model is trained and nowhere else, also on a base that views share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_lightning.evaluation.generate import Sampling, sample_batches
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.factory import frozen, load_base, load_policy, load_scalar_model
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.lora import AdaptedPolicy, add_policy, add_scalar_model
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.noise import RowNoise
from tests.builders.models import (
    EOS,
    MODEL_TYPES,
    PAD,
    prompt_batch,
    prompt_rows,
    tiny_policy,
    tiny_tokenizer,
)

IDS = torch.arange(2, 34).reshape(2, 16)
POSITIONS, TOKENS = torch.arange(0, 30), torch.arange(3, 33)
PLAIN = LoraHparams(r=4, alpha=8)
DROPPING = LoraHparams(r=4, alpha=8, dropout=0.5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for kind in MODEL_TYPES:
        tiny_policy(kind, seed=3).model.save_pretrained(root / kind)
    return {kind: root / kind for kind in MODEL_TYPES}


def answer(model: torch.nn.Module) -> Tensor:
    if isinstance(model, PolicyModel):
        return model(IDS, POSITIONS, TOKENS).logprobs
    return model(IDS, POSITIONS)


def is_random(model: torch.nn.Module) -> bool:
    """Tell whether answers differ, which must not be by rounding alone."""
    first, *others = (answer(model) for _ in range(6))  # OPT drops whole layers, sometimes all
    distance = max(float((first - other).detach().abs().max()) for other in others)
    assert distance == 0 or distance > 1e-2
    return distance > 0


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [None, PLAIN, DROPPING], ids=["whole", "lora", "lora.dropout"])
@pytest.mark.parametrize("kind", ["gpt2", "opt", "gpt_neox"])
def test_dropout_is_on_in_train_mode_and_off_in_eval_mode(folders, kind, lora):
    dropout = 0.0 if lora is DROPPING else 0.5
    loads = (load_policy, partial(load_scalar_model, head="reward"))
    for model in (shaken(load(folders[kind], dropout=dropout, lora=lora)) for load in loads):
        for _ in range(2):
            assert is_random(model.train())
            assert not is_random(model.eval())


def test_views_of_one_base_are_each_in_a_mode_of_their_own(folders):
    base = load_base(folders["gpt2"], DROPPING, dropout=0.3)
    policy = shaken(add_policy(base, "policy", seed=0))
    value = shaken(add_scalar_model(base, "value", init_std=0.3, seed=1)).eval()
    reference = frozen(AdaptedPolicy(base, None))
    for _ in range(2):
        assert is_random(policy)
        assert not is_random(value)
        assert not is_random(reference)
    with policy.generating():
        pass
    assert not is_random(value), "generating switched the neighbour's dropout on"
    assert is_random(policy), "generating left the policy's dropout off"
    value.train()
    assert not is_random(policy.eval())
    assert is_random(value)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_layer_that_is_computed_again_drops_what_it_dropped_before(folders, kind):
    gradients = []
    for checkpointing in (False, True):
        base = load_base(
            folders[kind], DROPPING, dropout=0.3, activation_checkpointing=checkpointing
        )
        policy = shaken_alike(add_policy(base, "policy", seed=0))
        reference = frozen(AdaptedPolicy(base, None))
        torch.manual_seed(5)
        loss = answer(policy).sum()
        answer(reference)  # the base is in eval mode when the layers run again
        loss.backward()
        gradients.append([p.grad for p in policy.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        assert torch.equal(plain, again)


def shaken_alike(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(4)
    return shaken(model)


@pytest.mark.parametrize("lora", [None, PLAIN], ids=["whole", "lora"])
def test_the_kl_of_a_policy_that_is_being_trained_is_measured_without_its_dropout(folders, lora):
    policy = load_policy(folders["gpt2"], dropout=0.5, lora=lora)
    reference = frozen(load_policy(folders["gpt2"]))
    sampling = Sampling(
        CachedGenerator((EOS,), PAD), tiny_tokenizer(), temperature=1.0, max_new_tokens=6
    )
    prompts = prompt_batch(prompt_rows((3, 5, 2)))
    answers = sample_batches(
        policy.train(), [prompts], sampling, noise=RowNoise(1, "evaluation"), reference=reference
    )
    assert sum(answers.lengths) > 6
    assert max(map(abs, answers.kl)) < 1e-4, "the policy is the reference"
    assert policy.training
    assert is_random(policy)
