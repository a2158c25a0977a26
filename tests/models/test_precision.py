"""Models whose matrices are rounded compute by themselves in the precision of their rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models import cpu
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.models.ppo_models import ppo_models
from rlhf_lightning.models.precision import MIXED_BF16, in_precision, set_matmul_precision
from tests.builders.models import prompt_batch
from tests.models.test_architectures import hub_model
from tests.rollout.plain_generation import ROWS, generated

CPU = torch.device("cpu")
KINDS = ("qwen2", "gpt2", "llama")
IDS = torch.arange(2, 34).reshape(2, 16)
POSITIONS, TOKENS = torch.arange(0, 30), torch.arange(3, 33)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hub")
    return {kind: hub_model(root / kind, kind) for kind in KINDS}


def statistics(model: Any) -> Tensor:
    return model(IDS, POSITIONS, TOKENS).logprobs


def tokens(model: Any) -> Tensor:
    with model.generating() as inner:
        answers = generated(inner, prompt_batch(ROWS[:4]), max_new_tokens=5)
    return torch.tensor([id for ids in answers.values() for id in ids])


def scalars(model: Any) -> Tensor:
    return model(IDS, POSITIONS)


LORA = LoraHparams(r=4, alpha=8, base_precision=MIXED_BF16)
CASES: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Tensor]]] = {}
for _name, _call in (("statistics", statistics), ("tokens", tokens)):
    CASES[f"reference-{_name}"] = (
        lambda f: ppo_models(f, f, value_head="zero", precision=MIXED_BF16).reference,
        _call,
    )
    CASES[f"adapter-{_name}"] = (partial(load_policy, lora=LORA), _call)
CASES["reward-scores"] = (
    partial(load_scalar_model, head="reward", precision=MIXED_BF16),
    scalars,
)
CASES["reward-adapter-scores"] = (partial(load_scalar_model, head="reward", lora=LORA), scalars)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "fused"), [*((kind, True) for kind in KINDS), ("llama", False)])
@torch.no_grad()
def test_a_rounded_model_gives_without_autocast_what_it_gives_under_it(
    folders, kind, fused, case, monkeypatch
):
    if not fused:
        monkeypatch.setattr(cpu, "use_fused_layers", lambda model: None)
    build, call = CASES[case]
    model = build(folders[kind])
    assert torch.bfloat16 in {p.dtype for p in model.root.parameters()}, "nothing was rounded"
    assert not torch.is_autocast_enabled("cpu")
    got = call(model)
    assert not torch.is_autocast_enabled("cpu")
    with in_precision(MIXED_BF16, CPU):
        expected = call(model)
    assert torch.equal(got, expected)
    assert got.float().std() > 0


@torch.no_grad()
def test_a_model_in_fp32_computes_in_fp32(folders):
    model = load_policy(folders["qwen2"])
    assert not torch.equal(statistics(model), in_bf16(model))
    one = in_precision("32-true", CPU)
    with one:
        assert not torch.is_autocast_enabled("cpu")


def in_bf16(model: Any) -> Tensor:
    with in_precision(MIXED_BF16, CPU):
        return statistics(model)


def test_fp32_products_on_cuda_are_in_tf32_where_allowed_and_a_cpu_keeps_its_bits(monkeypatch):
    before = torch.get_float32_matmul_precision()
    try:
        set_matmul_precision("high")
        assert torch.get_float32_matmul_precision() == before == "highest"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        set_matmul_precision("high")
        assert torch.get_float32_matmul_precision() == "high"
        set_matmul_precision("highest")
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
