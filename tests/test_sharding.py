"""Scores and state of a scalar model under FSDP2, on a process group of one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from rlhf_lightning.distributed.collectives import (
    SHARD,
    accumulating,
    full_state,
    mesh_in_groups,
    shard,
    unsharded,
)
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.factory import frozen
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.models.lora import AdaptedBase, add_scalar_model
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.generators.captured import CapturedGenerator
from rlhf_lightning.rollout.noise import RowNoise
from tests.builders.models import (
    PAD,
    VOCABULARY,
    flat_gradients,
    prompt_batch,
    prompt_rows,
    tiny_policy,
    tiny_scalar_model,
)

ROWS, WIDTH = 32, 16
OFFSET = 9.0  # neighbouring numbers of bf16 are 1 / 16 apart there


@pytest.fixture
def one_rank() -> Iterator[SimpleNamespace]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(mesh_of_shards=mesh_in_groups("cpu", 1, 1)[SHARD])
    dist.destroy_process_group()


def scalar_model(kind: str) -> ScalarHeadModel:
    if kind == "whole":
        return tiny_scalar_model("llama", bias=OFFSET)
    base = AdaptedBase(tiny_policy("llama").model, LoraHparams(r=4, alpha=8))
    model = add_scalar_model(base, "reward", init_std=0.3, seed=1)
    torch.nn.init.constant_(model.head.bias, OFFSET)
    return model


def scores(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCABULARY, (ROWS, WIDTH), generator=generator)
    result: torch.Tensor = model(ids, torch.arange(ROWS) * WIDTH + WIDTH - 1)
    return result


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_a_sharded_scalar_models_head_is_not_rounded_to_the_compute_dtype(kind, frozen, one_rank):
    expected = scores(scalar_model(kind)).detach()
    model = scalar_model(kind)
    shard(model.root, one_rank, frozen=frozen, compute_dtype=torch.bfloat16)
    got = scores(model)
    assert len(got.unique()) == len(expected.unique()) == ROWS
    torch.testing.assert_close(got, expected, rtol=0, atol=0.2)  # the trunk's bf16
    model.head.zero_grad()
    (got * torch.arange(ROWS) / 3).sum().backward()
    grad = model.head.bias.grad.full_tensor()
    torch.testing.assert_close(grad, (torch.arange(ROWS) / 3).sum()[None])


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_a_sharded_model_that_was_normalized_after_a_forward_is_saved_so(
    kind, compute_dtype, one_rank
):
    whole, sharded = scalar_model(kind), scalar_model(kind)
    shard(sharded.root, one_rank, frozen=False, compute_dtype=compute_dtype)
    with torch.no_grad():
        scores(sharded)  # the root keeps what it has gathered
    whole.normalize(7.0, 2.5)
    sharded.normalize(7.0, 2.5)
    state = full_state(sharded)
    assert state.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name
    assert state["head.bias"].item() == pytest.approx((OFFSET - 7.0) / 2.5)
    with torch.no_grad():
        assert scores(sharded).mean().item() == pytest.approx(scores(whole).mean().item(), abs=0.05)


def generated(policy: Any, engine: Any = CachedGenerator) -> torch.Tensor:
    prompts = prompt_batch(prompt_rows([3, 8, 5, 6]))
    with torch.no_grad(), unsharded(policy.root), policy.generating() as model:
        written = engine([VOCABULARY - 1], PAD)(
            model, prompts, noise=RowNoise(1), temperature=1.0, max_new_tokens=12
        )
    return written.sequences


@pytest.mark.parametrize("trains", [False, True])
def test_what_is_freed_after_a_forward_is_as_before_once_a_root_was_gathered(trains, one_rank):
    model = tiny_policy("llama") if trains else frozen(tiny_policy("llama"))
    shard(model.root, one_rank, frozen=not trains, compute_dtype=None)
    ids = torch.arange(2, 18).view(1, -1)

    def stays_gathered() -> bool:
        with torch.no_grad():
            model(ids, torch.arange(15), ids[0, 1:], 1.0, False)
        return not isinstance(model.model.lm_head.weight, DTensor)

    assert stays_gathered() is trains
    with unsharded(model.root, layers=False):
        assert stays_gathered()
    assert isinstance(model.model.lm_head.weight, DTensor)
    assert stays_gathered() is trains


@pytest.mark.parametrize("engine", [CachedGenerator, partial(CapturedGenerator, capture=False)])
def test_generation_runs_none_of_fsdps_hooks_and_training_has_them_back(
    engine, one_rank, monkeypatch
):
    hooks_run: list[str] = []

    def counted(plain: Any) -> Any:
        def hook(state: Any, *arguments: Any) -> Any:
            hooks_run.append(plain.__name__)
            return plain(state, *arguments)

        return hook

    for hook in (FSDPState._pre_forward, FSDPState._post_forward):
        monkeypatch.setattr(FSDPState, hook.__name__, counted(hook))
    whole, sharded = tiny_policy("llama"), tiny_policy("llama")
    shard(sharded.root, one_rank, frozen=False, compute_dtype=None)
    called: list[Any] = []
    layer = sharded.model.model.layers[0]
    layer.register_forward_pre_hook(lambda *_: called.append("before"))  # one of a user
    units = [m for m in sharded.modules() if isinstance(m, FSDPModule)]
    registered = [[list(m._forward_pre_hooks), list(m._forward_hooks)] for m in units]
    assert torch.equal(generated(sharded, engine), generated(whole))
    assert hooks_run == []
    assert called, "hooks of others run"
    assert [[list(m._forward_pre_hooks), list(m._forward_hooks)] for m in units] == registered

    ids = torch.arange(2, 18).view(1, -1)
    for policy in (whole, sharded):
        policy(ids, torch.arange(15), ids[0, 1:], 1.0, False).logprobs.sum().backward()
    assert len(hooks_run) == 2 * len(units)
    for parameter in sharded.parameters():
        parameter.grad = parameter.grad.full_tensor()
    torch.testing.assert_close(flat_gradients(sharded), flat_gradients(whole), rtol=0, atol=1e-6)


def test_gradients_that_are_sent_once_a_step_are_the_sum_of_all_micro_batches(one_rank):
    ids = torch.arange(2, 18).view(1, -1)

    def gradients(sync: str) -> tuple[list[bool], torch.Tensor]:
        policy = tiny_policy("llama")
        shard(policy.root, one_rank, frozen=False, compute_dtype=torch.bfloat16)
        strategy, sent = SimpleNamespace(gradient_sync=sync), []
        for index in range(3):
            with accumulating(strategy, policy, last=index == 2):
                loss = policy(ids + index, torch.arange(15), ids[0, 1:], 1.0, False).logprobs.sum()
                loss.backward()
            sent.append(all(p.grad is not None for p in policy.parameters()))
        for parameter in policy.parameters():
            parameter.grad = parameter.grad.full_tensor()
        return sent, flat_gradients(policy)

    (every_time, expected), (once, got) = gradients("micro_batch"), gradients("step")
    assert every_time == [True, True, True]
    assert once == [False, False, True]
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
