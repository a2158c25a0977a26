"""Activation checkpointing keeps the state of random numbers only where a layer draws some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.factory import load_policy
from tests.builders.models import flat_gradients, tiny_policy

IDS = torch.arange(12).view(2, 6) + 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tiny_policy("llama").model.save_pretrained(folder)
    return folder


def gradients(policy: Any) -> torch.Tensor:
    torch.manual_seed(3)
    policy.train()
    policy(IDS, torch.arange(10), IDS.flatten()[1:11]).logprobs.sum().backward()
    return flat_gradients(policy)


def states_read(policy: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    count, read = 0, torch.get_rng_state

    def counted() -> torch.Tensor:
        nonlocal count
        count += 1
        return read()

    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_rng_state", counted)
        gradients(policy)
    return count


@pytest.mark.parametrize(("lora", "dropout"), [(None, 0.0), (None, 0.5), (0.0, 0.0), (0.5, 0.0)])
def test_the_state_is_kept_with_dropout_alone_and_gradients_are_those_without_checkpointing(
    source, lora, dropout, monkeypatch
):
    options: dict[str, Any] = {"dropout": dropout}
    if lora is not None:
        options["lora"] = LoraHparams(r=4, alpha=8, dropout=lora)
    plain = load_policy(source, **options)
    kept = load_policy(source, **options, activation_checkpointing=True)
    for policy in (plain, kept):
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.1)
    expected = gradients(plain)
    assert expected.abs().max() > 0
    assert torch.equal(gradients(kept), expected)
    assert bool(states_read(kept, monkeypatch)) == bool(dropout or lora)


def test_an_adapter_with_dropout_beside_one_without_keeps_the_state(source, monkeypatch):
    policy = load_policy(source, lora=LoraHparams(r=4, alpha=8), activation_checkpointing=True)
    assert not states_read(policy, monkeypatch)
    policy.base.add_adapter("other", seed=1, lora=LoraHparams(r=4, alpha=8, dropout=0.5))
    assert states_read(policy, monkeypatch)
