"""Decoder layers that are compiled, or computed by Liger, against those of transformers."""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from rlhf_lightning.distributed.collectives import SHARD, mesh_in_groups, shard
from rlhf_lightning.distributed.fake_ranks import fake_ranks, own_part
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models import layer_kernels as layer_kernels_module
from rlhf_lightning.models.cpu_kernels import cpu_kernels
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.layer_kernels import layer_kernels
from tests.builders.models import config_fields, flat_gradients, tiny_scalar_model

pytestmark = pytest.mark.timeout(600)
FAMILIES = {
    "llama": {},
    "qwen2": {"hidden_size": 32},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
}
LAYERS = 3
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def fields(model_type: str) -> dict[str, Any]:
    shared = config_fields("llama", num_hidden_layers=LAYERS)
    return {**shared, **FAMILIES[model_type], "model_type": model_type}


def policy(kernels: str, model_type: str = "llama", **options: Any) -> PolicyModel:
    with layer_kernels(kernels), cpu_kernels(False):
        return load_policy(from_scratch=fields(model_type), **options)


def computed(
    model: PolicyModel, *, rows: int = 2, width: int = 16, device: str = "cpu", bf16=False
):
    """Return log-probabilities and the gradients of all weights."""
    ids = torch.arange(rows * width, device=device).reshape(rows, width) % 40 + 2
    positions = torch.arange(5, width, device=device)
    model.zero_grad()
    precise = torch.autocast(device, torch.bfloat16) if bf16 else nullcontext()
    with precise:
        statistics = model(ids, positions, ids.flatten()[positions + 1 - (positions + 1) // width])
    (statistics.logprobs.sum() + statistics.entropy.sum()).backward()
    return statistics.logprobs.detach(), flat_gradients(model).clone()


@pytest.fixture
def graphs(monkeypatch):
    """The number of graphs that were compiled since the test began.

    They are captured and differentiated as always; `inductor`, which takes minutes, in one test.
    """
    monkeypatch.setattr(layer_kernels_module, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    layer_kernels_module._compiled.cache_clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    layer_kernels_module._compiled.cache_clear()


@pytest.mark.slow
def test_compiled_layers_give_the_numbers_of_plain_ones_and_share_their_graphs(graphs):
    plain, compiled = policy("none"), policy("compile")
    for rows, width in ((2, 16), (3, 32), (4, 48)):
        found = computed(compiled, rows=rows, width=width)
        for ours, theirs in zip(found, computed(plain, rows=rows, width=width), strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)
    assert 1 <= graphs() <= 2, "every layer, or every width, has a graph of its own"


@pytest.mark.slow
def test_compiled_layers_under_autocast_and_with_other_families_are_right(graphs, monkeypatch):
    monkeypatch.setattr(layer_kernels_module, "BACKEND", "inductor")
    for family in FAMILIES:
        plain, compiled = policy("none", family), policy("compile", family)
        for ours, theirs in zip(computed(compiled), computed(plain), strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)
    ours, theirs = computed(compiled, bf16=True), computed(plain, bf16=True)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0.05)


@pytest.mark.slow
def test_repeated_layers_are_compiled_too(graphs):
    plain = policy("none", activation_checkpointing=True)
    compiled = policy("compile", activation_checkpointing=True)
    for ours, theirs in zip(computed(compiled), computed(plain), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert graphs() >= 1


def test_names_of_weights_do_not_change_and_generation_is_plain(graphs):
    plain, compiled = policy("none"), policy("compile")
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in plain.named_modules()]
    ids = torch.arange(2, 12).unsqueeze(0)
    with compiled.generating() as model, plain.generating() as other, torch.no_grad():
        torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=0, atol=0)
    assert graphs() == 0


@pytest.mark.slow
def test_adapters_of_one_base_are_compiled_and_told_apart(graphs, tmp_path):
    policy("none").model.save_pretrained(tmp_path)
    found = {}
    for kernels in ("none", "compile"):
        with layer_kernels(kernels), cpu_kernels(False):
            adapted: Any = load_policy(tmp_path, lora=LoraHparams(r=2, alpha=64), seed=3)
        base = computed(adapted)[0]
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_B" in name:
                    weight.normal_(generator=torch.Generator().manual_seed(5))
        found[kernels] = (base, *computed(adapted))
    assert not torch.allclose(found["compile"][0], found["compile"][1], atol=1e-2)
    for ours, theirs in zip(found["compile"], found["none"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert graphs() >= 1


def test_a_value_model_is_compiled(graphs):
    with layer_kernels("compile"):
        model = tiny_scalar_model("llama")
    with cpu_kernels(False):
        expected = tiny_scalar_model("llama")
    ids, positions = torch.arange(2, 34).reshape(2, 16), torch.arange(20)
    torch.testing.assert_close(model(ids, positions), expected(ids, positions), **CLOSE)
    assert graphs() >= 1


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_that_are_compiled_and_then_sharded_compute_what_plain_ones_do(
    checkpointing, graphs
):
    options = {"activation_checkpointing": checkpointing}
    expected = computed(policy("none", **options))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = policy("compile", **options)
        repeated: list[Any] = []
        if checkpointing:
            layer = model.model.base_model.layers[1]
            kept = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = lambda *a: (repeated.append(a), kept(*a))[1]
        place = SimpleNamespace(mesh_of_shards=mesh_in_groups("cpu", 1, 1)[SHARD])
        shard(model, place, frozen=False, compute_dtype=None)
        found = computed(model)
        torch.testing.assert_close(found[0], expected[0], **CLOSE)
        torch.testing.assert_close(found[1].full_tensor(), expected[1], **CLOSE)
        # The hooks of FSDP2 are around the layers, and all of them share their graphs.
        assert 1 <= graphs() <= 2
        assert len(repeated) == (1 if checkpointing else 0)
        assert model.state_dict().keys() == policy("none").state_dict().keys()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_compiled_layers_of_one_of_two_ranks_run_and_differentiate(graphs):
    # Numbers of the other rank do not arrive; shapes, hooks and collectives are FSDP2's.
    with fake_ranks(2, rank=0):
        model = policy("compile")
        place = SimpleNamespace(mesh_of_shards=mesh_in_groups("cpu", 2, 2)[SHARD])
        shard(model, place, frozen=False, compute_dtype=torch.bfloat16)
        for _ in range(2):
            ids, positions = torch.arange(2, 34).reshape(2, 16), torch.arange(20)
            model(ids, positions, positions).logprobs.sum().backward()
        for name, parameter in model.named_parameters():
            assert "_orig_mod" not in name
            assert own_part(parameter.grad).shape == own_part(parameter).shape
        assert 1 <= graphs() <= 2


def test_what_is_asked_for_and_cannot_be_had_is_an_error(monkeypatch):
    with pytest.raises(ValueError, match=r"model.kernels=fast must be one of auto, liger"):
        layer_kernels("fast").__enter__()
    found, here = importlib.util.find_spec, torch.cuda.is_available()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs liger-kernel \(pip install -e '.\[gpu\]'"):
        policy("liger")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    if not here:
        with pytest.raises(ValueError, match=r"needs a CUDA device: use model.kernels=compile"):
            policy("liger")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with layer_kernels("liger"), pytest.raises(ValueError, match=r"knows llama.*, not gpt2"):
        load_policy(from_scratch=config_fields("gpt2"))
    monkeypatch.setattr(importlib.util, "find_spec", found)


def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run Liger's kernels on a CPU: it lacks floats and CUDA's `rsqrt`."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))  # the interpreter's own
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def assert_liger_is_right(model_type: str, device: str) -> None:
    plain, fused = policy("none", model_type).to(device), policy("liger", model_type).to(device)
    kernels = {type(m).__name__ for m in fused.modules() if "forward" in vars(m)}
    assert len(kernels) == 2, "norms and MLPs"
    assert fused.state_dict().keys() == plain.state_dict().keys()
    for ours, theirs in zip(
        computed(fused, device=device), computed(plain, device=device), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", FAMILIES)
def test_liger_gives_the_numbers_of_plain_layers(model_type):
    pytest.importorskip("liger_kernel")
    assert_liger_is_right(model_type, "cuda")


@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs liger-kernel, triton and TRITON_INTERPRET=1",
)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_ligers_kernels_interpreted_give_the_numbers_of_plain_layers(model_type, monkeypatch):
    interpreted(monkeypatch)
    assert_liger_is_right(model_type, "cpu")
