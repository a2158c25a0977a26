"""Print what in a token step of `CapturedGenerator` no CUDA graph could hold, as JSON.

A program: fake CUDA tensors need a process of their own. It runs the step on models of several
families, and steps into which a fault was put.
"""

from __future__ import annotations

# isort: off
from benchmarks.fake_cuda import DEVICE, autocast, fake_cuda  # before torch
# isort: on

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as ReadsNumbersError
from torch._subclasses.fake_tensor import DynamicOutputShapeException as ShapeOfNumbersError
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.rollout.generators import prepared_weights
from rlhf_lightning.rollout.generators.captured_step import COLUMNS, Step
from rlhf_lightning.rollout.generators.kv_cache import InPlaceCache
from rlhf_lightning.rollout.generators.prepared_weights import PreparedWeights
from tests.builders.models import MODEL_TYPES, PAD, config_fields

FAMILIES = (*MODEL_TYPES, "qwen3")
ROWS, WIDTH, NEW = 4, 6, 20  # of a batch, the prompts and the responses
# The host waits for each of these, which ends a capture.
WAITS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select",
        "nonzero", "unique_consecutive", "unique_dim",
    )
}  # fmt: skip
COPIES = {"aten::_to_copy", "aten::copy_"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Watching(TorchDispatchMode):
    """Notes every operation, and what of it cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.problems: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in WAITS:
            self.problems.append(f"{name} waits for the device")
        if any(_of_host(x, name) for x in tensors):
            self.problems.append(f"{name} takes a tensor of the host")
        masks = [i for i in args[1] if i is not None] if name in INDEXED else []
        if any(i.dtype in (torch.bool, torch.uint8) for i in masks):
            self.problems.append(f"{name} by a mask has a shape that the host waits for")
        output = func(*args, **kwargs)
        made = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        if any(_of_host(x, name) for x in made):
            self.problems.append(f"{name} makes a tensor of the host")
        self.calls.append(f"{name} {tree_map(_described, (args, kwargs))}")
        return output


def _of_host(x: Tensor, name: str) -> bool:
    # A single number of the host is an argument of a kernel, unless it is copied.
    return x.device.type == "cpu" and (x.ndim > 0 or name in COPIES)


def _described(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), str(x.dtype)) if isinstance(x, Tensor) else x


def new_step(config: Any, dtype: torch.dtype, cls: type[Step] = Step) -> Step:
    """Return the step of a model of random weights, ready for its first token."""
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        cache = InPlaceCache(config, slots=ROWS, prompt_columns=COLUMNS, max_columns=COLUMNS)
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        states = torch.zeros(ROWS, heads, WIDTH, size, dtype=dtype)
        cache.use(first_row=0, rows=ROWS, start=0, end=0)
        for layer in cache.in_place:
            layer.update(states, states)
        running: Any = SimpleNamespace(
            rows=torch.arange(ROWS), width=WIDTH, lengths=torch.ones(ROWS, device="cpu").long()
        )
        weights = PreparedWeights(model)  # under autocast, if the step will be
        step = cls(model, cache, (ROWS, COLUMNS, NEW), [1], PAD, weights)
        step.start(running, torch.zeros(ROWS, NEW, dtype=torch.float64), 0.9, _as_it_is)
        step.sample(torch.zeros(ROWS, config.vocab_size))
    step.fit_columns(WIDTH + 1)
    return step


def _as_it_is(logits: Tensor, temperature: float) -> Tensor:
    return logits


def problems_of(step: Step) -> list[str]:
    """Return what two runs of a step have that a graph cannot hold, or would not repeat."""
    found: list[str] = []
    runs = []
    with torch.no_grad(), step.weights.in_use():
        for _ in range(3):  # the first is the run before a capture
            held = dict(vars(step))
            watching = Watching()
            try:
                with watching:
                    step()
            except (ReadsNumbersError, ShapeOfNumbersError) as error:
                watching.problems.append(f"{error.func} asks for numbers of the device")
            found += watching.problems
            runs.append(watching.calls)
            bound = [n for n, v in vars(step).items() if isinstance(v, Tensor) and v is not held[n]]
            found += [f"{name} is another tensor after a step" for name in bound]
    if not found and runs[1] != runs[2]:
        differ = next(pair for pair in zip(*runs[1:], strict=False) if pair[0] != pair[1])
        found.append(f"a second step is another one: {differ[0]} and {differ[1]}")
    assert len(runs[0]) > 50 or found, "nothing was run"
    return sorted(set(found))


def broken(fault: str) -> type[Step]:
    """Return a step with a fault in it."""

    class Broken(Step):
        count = 0

        def sample(self, logits: Tensor) -> None:
            super().sample(logits)
            if self.columns == 0:  # the prompts are read outside of the graph
                return
            if fault == "item":
                self.uniform.mul_(self.t.item())
            elif fault == "mask":
                self.tokens[self.stopped] = self.tokens[self.stopped]
            elif fault == "upload":
                self.tokens.add_(torch.tensor(1, device="cpu").to(DEVICE))
            elif fault == "counter":
                self.count += 1
                self.responses[:, self.count] = 0
            elif fault == "rebound":
                self.column = self.column + 0

    return Broken


FAULTS = ("item", "mask", "upload", "counter", "rebound")


def main() -> None:
    """Write the problems of each step to the file that is named."""
    found: dict[str, Any] = {}
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    plain = (*prepared_weights.PLAIN, FakeTensor)
    with fake_cuda(), patch.object(prepared_weights, "PLAIN", plain):
        for model_type in FAMILIES:
            config = AutoConfig.for_model(**config_fields(model_type))
            found[model_type] = problems_of(new_step(config, torch.bfloat16))
        llama = AutoConfig.for_model(**config_fields("llama"))
        with autocast():
            found["llama under autocast"] = problems_of(new_step(llama, torch.float32))
        for fault in FAULTS:
            found[fault] = problems_of(new_step(llama, torch.float32, broken(fault)))
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
