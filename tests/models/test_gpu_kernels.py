"""Fused kernels on instances of decoders: `model.kernels`."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from rlhf_lightning.models import gpu_kernels as module
from rlhf_lightning.models.compute_copies import compute_copies
from rlhf_lightning.models.cpu_kernels import cpu_kernels
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.gpu_kernels import (
    compiles_head,
    fuse_layers,
    fused_parts,
    gpu_kernels,
    kernels_of,
    use_gpu_kernels,
)
from tests.builders.models import config_fields

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"hidden_size": 32},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
}


def policy(model_type: str) -> Any:
    fields = {**config_fields("llama", num_hidden_layers=2), **FAMILIES[model_type]}
    with cpu_kernels(False):
        found: Any = load_policy(from_scratch=fields | {"model_type": model_type})
    return found


def computed(model: Any, device: str, *, bf16: bool, copies: bool = False) -> list[torch.Tensor]:
    """Return log-probabilities and the gradients of all weights."""
    ids = torch.arange(48, device=device).reshape(3, 16) % 40 + 2
    positions = torch.arange(5, 40, device=device)
    model.zero_grad()
    with ExitStack() as stack:
        if bf16:
            stack.enter_context(torch.autocast(device, torch.bfloat16, cache_enabled=False))
        if copies:
            stack.enter_context(compute_copies(model, devices=(device,)))
        found = model(ids, positions, ids.flatten()[positions])
        (found.logprobs.sum() + found.entropy.sum()).backward()
    return [found.logprobs.detach(), *(p.grad.clone() for p in model.parameters())]


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[float]:
    return [float((a - b).norm()) for a, b in zip(ours, theirs, strict=True)]


def assert_within_twice_bf16(fused: Any, model_type: str, device: str, *, copies: bool) -> None:
    plain = policy(model_type).to(device)
    exact = computed(plain, device, bf16=False)
    in_bf16 = distance(computed(plain, device, bf16=True), exact)
    ours = distance(computed(fused, device, bf16=True, copies=copies), exact)
    scale = [float(x.norm()) for x in exact]
    for name, off, allowed, size in zip(
        ["logprobs", *(n for n, _ in fused.named_parameters())], ours, in_bf16, scale, strict=True
    ):
        assert off <= 2 * allowed + 1e-6 * size, name
    ours = distance(computed(fused, device, bf16=False), exact)
    for off, size in zip(ours, scale, strict=True):
        assert off <= 1e-5 * size


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_torchs_norm_is_as_exact_as_the_layers(model_type, monkeypatch):
    monkeypatch.setattr(module, "DEVICE", "cpu")
    fused = policy(model_type)
    use_gpu_kernels(fused)
    assert fused_parts(fused) >= {"norms"}
    assert_within_twice_bf16(fused, model_type, "cpu", copies=True)


def test_classes_and_models_on_a_cpu_stay_as_they_are():
    plain, fused = policy("qwen2"), policy("qwen2")
    use_gpu_kernels(fused)
    assert not fused_parts(fused), "it is on a CPU"
    fuse_layers(fused.model, liger=True)  # as on a GPU, from where it comes back
    norm = type(fused.model.model.norm)
    assert "torch_norm" not in norm.forward.__name__
    assert fused_parts(fused) == {"norms", "MLPs"}
    assert fused_parts(plain) == set()
    assert fused.state_dict().keys() == plain.state_dict().keys()
    clone = copy.deepcopy(fused)
    with torch.no_grad():
        for weight in clone.parameters():
            weight.zero_()
    expected = computed(plain, "cpu", bf16=False)
    for ours, theirs in zip(computed(fused, "cpu", bf16=False), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert not computed(clone, "cpu", bf16=False)[1].any(), "the clone has its own weights"


def test_the_switch_leaves_models_to_transformers(monkeypatch):
    monkeypatch.setattr(module, "DEVICE", "cpu")
    with gpu_kernels("torch"):
        plain = policy("llama")
        use_gpu_kernels(plain)
        assert not fused_parts(plain)
        assert not compiles_head(torch.device("cpu"))
        assert "model.kernels=torch" in kernels_of([plain])
    use_gpu_kernels(plain)
    assert "norms" in kernels_of([plain])
    with pytest.raises(ValueError, match=r"model.kernels='liger': use auto, torch"):
        gpu_kernels("liger").__enter__()
