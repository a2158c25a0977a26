"""Phases of a PPO iteration on fake CUDA tensors, and the work that each of them is.

Every operation of the project's code that would be a kernel is counted with its operations and
bytes. A kernel takes the longest of its operations at the rate that matrix products reach, its
bytes at the bandwidth that is reached, and a floor. The host takes a constant for each kernel.

Legend: L layers, W padded width, N positions that are asked about.
"""

from __future__ import annotations

# isort: off
from benchmarks.fake_cuda import DEVICE, autocast  # before torch
# isort: on

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.models.activation_checkpointing import checkpoint_activations
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel, scalar_head
from rlhf_lightning.rollout.generators.kv_cache import InPlaceCache, cache_argument
from rlhf_lightning.rollout.noise import sample_unchecked


class Gpu(NamedTuple):
    """Rates that are reached: operations (bf16) and bytes a second, and bytes over NVLink."""

    operations: float
    bandwidth: float
    link: float


GPUS = {
    "A100": Gpu(312e12 * 0.65, 2.0e12 * 0.8, 300e9 * 0.8),
    "H100": Gpu(989e12 * 0.55, 3.35e12 * 0.8, 450e9 * 0.8),
}
FP32 = 1 / 16  # of the rate in bf16, without TF32
KERNEL_SECONDS = 2.5e-6  # the shortest kernel, with the gap behind it
HOST_SECONDS = 9e-6  # Python, dispatcher and launch, for each kernel
FEW, MORE = 2, 3  # layers that are counted; others are extrapolated, as they are alike


@dataclass(frozen=True)
class Model:
    """A model, and the PPO run that its recipe makes of it.

    Args:
        fields: of its config.
        gpus: that share every model (FSDP2, bf16 compute); 1 computes under autocast.
        prompts: of an iteration, on all GPUs.
        micro_batch_size: rows.
        checkpointing: activations are computed again.
    """

    fields: dict[str, Any]
    gpus: int = 1
    prompts: int = 128
    micro_batch_size: int = 8
    checkpointing: bool = False
    num_minibatches: int = 4
    num_epochs: int = 2


LONGEST_PROMPT = LONGEST_RESPONSE = 512

Work = Counter[str]  # "kernels", "operations", "bytes", "link" and, by GPU, seconds of its kernels

NO_KERNEL = {
    f"aten::{name}"
    for name in ("detach", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view")
}
READS_WHAT_IT_TAKES = {f"aten::{name}" for name in ("embedding", "index", "gather", "index_select")}
WRITES_WHAT_IT_GETS = {
    f"aten::{name}" for name in ("index_copy_", "index_put_", "scatter_add_", "scatter_")
}


class Counting(TorchDispatchMode):
    """Adds up the work of every operation that would be a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Work = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        """Run an operation and count it."""
        options = options or {}
        output = function(*arguments, **options)
        name = function._schema.name
        aliases = [returned.alias_info for returned in function._schema.returns]
        view = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        if view or name in NO_KERNEL or not name.startswith(("aten::", "fake_cuda::")):
            return output
        inputs = [t for t in tree_leaves((arguments, options)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        if all(t.device.type == "cpu" for t in (*inputs, *outputs)):
            return output
        flops = 0
        if function.overloadpacket in flop_registry:
            flops = flop_registry[function.overloadpacket](*arguments, **options, out_val=output)
        dtypes = {t.dtype for t in inputs if t.is_floating_point()}
        half = dtypes <= {torch.bfloat16, torch.float16}
        self._add(flops * (1 if half else 1 / FP32), flops, _bytes(name, inputs, outputs))
        return output

    def _add(self, slowed: float, flops: int, size: int) -> None:
        self.work["kernels"] += 1
        self.work["operations"] += flops
        self.work["bytes"] += size
        for name, gpu in GPUS.items():
            longest = max(slowed / gpu.operations, size / gpu.bandwidth, KERNEL_SECONDS)
            self.work[name] += longest  # type: ignore[assignment]


def _bytes(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    if name in READS_WHAT_IT_TAKES:
        return 2 * _size(outputs)
    if name in WRITES_WHAT_IT_GETS:
        return 2 * _size(inputs[1:])
    if name in ("aten::fill_", "aten::zero_"):
        return _size(outputs)
    return _size(inputs) + _size(outputs)


def _size(tensors: Sequence[Tensor]) -> int:
    # What is expanded is read once.
    return sum(t.untyped_storage().nbytes() if 0 in t.stride() else t.nbytes for t in tensors)


def seconds(work: Work, gpu: str) -> float:
    """Return what a phase takes: kernels, host or links, whichever is longest."""
    return max(float(work[gpu]), work["kernels"] * HOST_SECONDS, work["link"] / GPUS[gpu].link)


# -- the phases of a model -------------------------------------------------------------------------


class Phases:
    """The phases of one run: each a piece of the project's code; used inside `fake_cuda`."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.sharded = self.model.gpus > 1
        # FSDP2 gathers bf16 weights; on one GPU autocast casts fp32 ones.
        self.dtype = torch.bfloat16 if self.sharded else torch.float32
        self.token = cache(self._token)
        self.prefill = cache(self._prefill)
        self.score = cache(self._score)
        self.update = cache(self._update)
        self.network = cache(self._network)
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.model.fields))
        self.weights = sum(parameter.numel() for parameter in whole.parameters())

    def _token(self, rows: int, columns: int) -> Work:
        """One token of each of `rows` rows, with `columns` keys."""

        def run(layers: int) -> Counting:
            network = self.network(layers, torch.bfloat16).eval()
            cache = self._cache(network, rows, columns + 1)
            mask = torch.ones(rows, 1, 1, columns + 1, dtype=torch.bool, device=DEVICE)
            ids = torch.zeros(rows, 1, dtype=torch.long, device=DEVICE)
            uniform = torch.zeros(rows, device=DEVICE, dtype=torch.float64)
            cache.use(first_row=0, rows=rows, start=0, end=columns)
            with Counting() as counting, torch.no_grad():
                output: Any = network(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=ids,
                    use_cache=True,
                    logits_to_keep=1,
                    **cache_argument(network, cache),
                )
                sample_unchecked(output.logits[:, -1], uniform, temperature=1.0)
            return counting

        return self._of_depth(run)

    def _prefill(self, rows: int, width: int) -> Work:
        """The prompts of `rows` rows, read together."""

        def run(layers: int) -> Counting:
            network = self.network(layers, torch.bfloat16).eval()
            ids = torch.zeros(rows, width, dtype=torch.long, device=DEVICE)
            with Counting() as counting, torch.no_grad():
                network(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1)
            return counting

        return self._of_depth(run)

    def _score(self, rows: int, width: int, asked: int, of_values: bool) -> Work:
        """One micro-batch under one model without a graph: statistics, or scalars."""

        def run(layers: int) -> Counting:
            model, arguments = self._model(layers, rows, width, asked, of_values=of_values)
            with Counting() as counting, torch.no_grad(), self._autocast():
                model(*arguments) if of_values else model(*arguments, 1.0, True)
            return counting

        return self._of_depth(run) + self._gathered(passes=1)

    def _update(self, rows: int, width: int, asked: int, of_values: bool, first: bool) -> Work:
        """One micro-batch forward and backward; all but the first add to gradients."""

        def run(layers: int) -> Counting:
            model, arguments = self._model(layers, rows, width, asked, of_values=of_values)
            for parameter in model.parameters():
                parameter.grad = None if first or self.sharded else torch.empty_like(parameter)
            with Counting() as counting:
                with self._autocast():
                    found = model(*arguments) if of_values else model(*arguments, 1.0, False)
                (found if of_values else found.logprobs).sum().backward()
            return counting

        return self._of_depth(run) + self._gathered(passes=2, gradients=True)

    def step(self) -> Work:
        """Clip and AdamW of one model, on this GPU's share of its weights."""
        weights = self.weights // self.model.gpus
        clip, adam = 3, 7  # reads and writes of fp32 numbers a weight
        work: Work = Counter(kernels=16, bytes=4 * (clip + adam) * weights)
        for name, gpu in GPUS.items():
            work[name] = work["bytes"] / gpu.bandwidth  # type: ignore[assignment]
        return work

    def advantages(self, rows: int) -> Work:
        """Advantages and returns of a rollout."""
        rewards = torch.zeros(rows, LONGEST_RESPONSE, device=DEVICE)
        with Counting() as counting:
            compute_gae(rewards, rewards, rewards.bool(), gamma=1.0, gae_lambda=0.95)
        return counting.work

    def _of_depth(self, run: Callable[[int], Counting]) -> Work:
        few, more = run(FEW).work, run(MORE).work
        depth = self.model.fields["num_hidden_layers"] - FEW
        return Counter({key: few[key] + depth * (more[key] - few[key]) for key in few})

    def _network(self, layers: int, dtype: torch.dtype) -> Any:
        config = AutoConfig.for_model(**self.model.fields | {"num_hidden_layers": layers})
        with torch.device(DEVICE):
            network = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if self.model.checkpointing:  # for training alone: it does nothing in eval mode
            checkpoint_activations(network)
        return network

    def _model(
        self, layers: int, rows: int, width: int, asked: int, *, of_values: bool
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Return the policy or the value model, and a micro-batch for it."""
        network = self.network(layers, self.dtype).train()
        ids = torch.zeros(rows, width, dtype=torch.long, device=DEVICE)
        positions = torch.zeros(asked, dtype=torch.long, device=DEVICE)
        if not of_values:
            return PolicyModel(network), (ids, positions, torch.zeros_like(positions))
        with torch.device(DEVICE):
            head = scalar_head(network.config.hidden_size, init_std=0.0)
        return ScalarHeadModel(network.base_model, head), (ids, positions)

    def _cache(self, network: Any, rows: int, columns: int) -> InPlaceCache:
        config = network.config
        cache = InPlaceCache(config, slots=rows, prompt_columns=0, max_columns=columns)
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        shape = (rows, config.num_key_value_heads, columns, width)
        for layer in cache.in_place:
            states = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16)
            layer.lazy_initialization(states, states)
        cache.use(first_row=0, rows=rows, start=0, end=0)
        cache.reserve(columns)
        return cache

    def _autocast(self) -> Any:
        return nullcontext() if self.sharded else autocast()

    def _gathered(self, *, passes: int, gradients: bool = False) -> Work:
        """Return what FSDP2 sends for a micro-batch, and the copies into and out of its buffers."""
        if not self.sharded:
            return Counter()
        weights = self.weights
        sent = weights * (2 * passes + 4 * gradients)
        copied = weights * (4 * passes + 6 * gradients)
        work: Work = Counter(link=sent, bytes=copied)
        for name, gpu in GPUS.items():
            work[name] = copied / gpu.bandwidth  # type: ignore[assignment]
        return work
