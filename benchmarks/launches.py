"""Kernels that a token and a micro-batch of PPO's update launch, counted on fake CUDA tensors.

    python -m benchmarks.launches 0.5b 1b

It needs a CPU build of torch and `g++`. The project's own code runs on two and on three layers, and
what is dispatched is counted, but for views and allocations; other layers are like the third. It
counts what runs without liger-kernel. Before fused norms and bf16 copies of weights the update of
0.5B launched 4,504 on an H100 where this counted 4,149, and a captured token 1,159 where this
counted 1,115.
"""

from __future__ import annotations

# isort: off
from benchmarks.fake_cuda import DEVICE, autocast, fake_cuda  # before torch
# isort: on

import json
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import SHAPES
from rlhf_lightning.models.compute_copies import compute_copies
from rlhf_lightning.models.gpu_kernels import use_gpu_kernels
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.rollout.generators import prepared_weights
from rlhf_lightning.rollout.generators.captured_step import Step
from rlhf_lightning.rollout.generators.kv_cache import InPlaceCache

FEW, MORE = 2, 3  # layers that are counted
ROWS, COLUMNS = 64, 512  # of generation
MICRO_BATCH, WIDTH, ASKED = 32, 768, 512  # rows, tokens of each, and those with a log-probability
NO_KERNEL = {
    f"aten::{name}"
    for name in ("detach", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view")
}


class Counting(TorchDispatchMode):
    """Counts operations that would be a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        """Run an operation and count it."""
        output = function(*arguments, **(options or {}))
        name = function._schema.name
        aliases = [returned.alias_info for returned in function._schema.returns]
        view = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        tensors = [t for t in tree_leaves((arguments, options, output)) if isinstance(t, Tensor)]
        on_device = any(tensor.device.type == "cuda" for tensor in tensors)
        ours = name.startswith(("aten::", "fake_cuda::")) and name not in NO_KERNEL
        if on_device and ours and not view:
            self.counts[name] += 1
        return output


def token(network: Any) -> Counting:
    """Count a captured step: one token of each of `ROWS` rows."""
    config = network.eval().config
    cache = InPlaceCache(config, slots=ROWS, prompt_columns=COLUMNS, max_columns=COLUMNS)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    states = torch.empty(ROWS, config.num_key_value_heads, 1, width, device=DEVICE)
    running: Any = SimpleNamespace(
        rows=torch.arange(ROWS, device=DEVICE), width=1, lengths=torch.ones(ROWS).long()
    )
    plain = patch.object(prepared_weights, "PLAIN", (*prepared_weights.PLAIN, FakeTensor))
    with plain, autocast(), torch.no_grad():
        cache.use(first_row=0, rows=ROWS, start=0, end=0)
        for layer in cache.in_place:
            layer.update(states, states)
        weights = prepared_weights.PreparedWeights(network)
        step = Step(network, cache, (ROWS, COLUMNS, COLUMNS), [1], 0, weights)
        uniform = torch.zeros(ROWS, COLUMNS, device=DEVICE, dtype=torch.float64)
        step.start(running, uniform, 1.0, lambda logits, _: logits)
        step.fit_columns(COLUMNS)
        with weights.in_use():
            step.t += 1
            step()  # the run before a capture
            with Counting() as counting:
                step()
    return counting


def update(network: Any) -> Counting:
    """Count one micro-batch forward and backward, whose gradients are added to earlier ones."""
    policy = PolicyModel(network.train())
    for parameter in policy.parameters():
        parameter.grad = torch.empty_like(parameter)
    ids = torch.zeros(MICRO_BATCH, WIDTH, dtype=torch.long, device=DEVICE)
    positions = torch.zeros(MICRO_BATCH * ASKED, dtype=torch.long, device=DEVICE)
    # The backward pass too, as in a Trainer; the copies are those of an optimizer step.
    with autocast(), compute_copies(policy), Counting() as counting:
        found = policy(ids, positions, torch.zeros_like(positions), 1.0, False)
        found.logprobs.sum().backward()
    return counting


def launches(shape: str, count: Callable[[Any], Counting], dtype: torch.dtype) -> Counter[str]:
    """Return operations by name, of all layers of a shape."""
    few, more = (
        count(_network(SHAPES[shape] | {"num_hidden_layers": layers}, dtype)).counts
        for layers in (FEW, MORE)
    )
    others = SHAPES[shape]["num_hidden_layers"] - FEW
    return Counter({name: few[name] + others * (more[name] - few[name]) for name in more})


def _network(fields: dict[str, Any], dtype: torch.dtype) -> Any:
    with torch.device(DEVICE):
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=dtype)
    use_gpu_kernels(network)
    return network


def main(shapes: list[str]) -> None:
    """Print the counts of shapes as JSON."""
    found = {}
    with fake_cuda():
        for shape in shapes:
            counts = {
                "token": launches(shape, token, torch.float32),
                "update": launches(shape, update, torch.float32),
            }
            found[shape] = {
                phase: {"kernels": sum(own.values()), "most": own.most_common(12)}
                for phase, own in counts.items()
            }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
