"""Peaks of the passes of one model: training, a forward without a graph, generation.

Every pass runs the real code on fake tensors, with two and with three layers. Layers are alike, so
what is alive at a given moment (while the head works, in the backward of the last layer, ...)
grows by the same amount with each layer; from two counts follows that of any number. The peak of
the pass is the largest of these moments.

Legend: b rows of a micro-batch, W their padded width, N positions that are asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel, masking_utils
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.app.memory_plan.run import Style
from rlhf_lightning.app.memory_plan.tracker import (
    ACTIVATIONS,
    CACHE,
    GRADIENTS,
    HEAD,
    Bytes,
    Tracker,
)
from rlhf_lightning.models.heads import HeadLogits, PolicyModel, ScalarHeadModel, Teaching
from rlhf_lightning.rollout.generators.kv_cache import InPlaceCache, cache_argument
from rlhf_lightning.rollout.noise import sample_unchecked

Peaks = Mapping[str, Bytes]  # segment -> category -> bytes
FEW, MORE = 2, 3  # layers that are counted


@dataclass(frozen=True)
class Rows:
    """A micro-batch: rows of one padded width, of which some positions are asked about."""

    rows: int
    width: int
    asked: int  # positions a row


@dataclass(frozen=True)
class TeacherHead:
    """The head of a teacher whose whole distributions are learnt, by a kind of divergence."""

    vocabulary: int
    hidden_size: int
    dtype: torch.dtype
    kind: str

    def teaching(self, positions: int, tracker: Tracker) -> Teaching:
        """Return states of so many positions, which are counted, and the head, which is not."""
        weight = torch.empty(self.vocabulary, self.hidden_size, dtype=self.dtype)
        tracker.forget(weight)
        states = torch.empty(positions, self.hidden_size)
        return Teaching(states, HeadLogits(weight, None, None), self.kind, 0.5)


def extrapolated(
    measure: Callable[[int], Peaks], num_layers: int, *, few: int = FEW, more: int = MORE
) -> dict[str, dict[str, int]]:
    """Return `measure(num_layers)`, from counts with `few` and one more layers."""
    if num_layers <= more:
        return {segment: dict(live) for segment, live in measure(num_layers).items()}
    small, larger = measure(few), measure(more)
    found: dict[str, dict[str, int]] = {}
    for segment, live in small.items():
        other = larger[segment]
        a_layer = {name: other.get(name, 0) - live.get(name, 0) for name in {*live, *other}}
        depth = num_layers - few
        found[segment] = {n: live.get(n, 0) + depth * size for n, size in a_layer.items()}
    return found


def training_peaks(
    model: PolicyModel | ScalarHeadModel,
    batch: Rows,
    style: Style,
    *,
    accumulated: bool,
    in_place: bool,
    with_entropy: bool = False,
    taught: TeacherHead | None = None,
) -> Peaks:
    """Return the memory of a forward and backward pass, gradients included.

    Args:
        model: a fake model.
        batch: sizes of the micro-batch.
        style: precision and compute dtype.
        accumulated: gradients of a micro-batch before are there already.
        in_place: gradients go straight into `.grad` where they can, see `weight_gradients`.
        with_entropy: the loss has an entropy bonus.
        taught: the loss is a divergence from this teacher.
    """
    with tracked(model.root) as tracker:
        trained = [p for p in model.parameters() if p.requires_grad]
        # A weight with a hook is left to autograd.
        held = () if in_place else trained
        hooks = [p.register_post_accumulate_grad_hook(lambda _: None) for p in held]

        def name_gradients() -> None:
            for parameter in trained:
                if parameter.grad is not None:
                    tracker.relabel(parameter.grad, GRADIENTS)

        tracker.before_peak = name_gradients
        for parameter in trained if accumulated else ():
            parameter.grad = torch.empty_like(parameter)
            tracker.relabel(parameter.grad, GRADIENTS)
        teaching = None if taught is None else taught.teaching(batch.rows * batch.asked, tracker)
        tracker.peaks.clear()
        tracker.enter("embeddings")
        with layers_marked(model, tracker), autocast(style):
            loss = loss_of(model, batch, with_entropy, teaching)
            tracker.enter("loss", HEAD)
            loss.backward()
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
        return dict(tracker.peaks)


def forward_peaks(
    model: PolicyModel | ScalarHeadModel,
    batch: Rows,
    style: Style,
    *,
    with_entropy: bool = False,
) -> Peaks:
    """Return the memory of a forward pass without a graph.

    Args:
        model: a fake model.
        batch: rows of the forward.
        style: precision and compute dtype.
        with_entropy: compute the entropy of the policy's distribution.
    """
    with tracked(model.root) as tracker, torch.no_grad(), autocast(style):
        with layers_marked(model, tracker):
            loss_of(model, batch, with_entropy)
        return dict(tracker.peaks)


def loss_of(
    model: PolicyModel | ScalarHeadModel,
    batch: Rows,
    with_entropy: bool,
    teaching: Teaching | None = None,
) -> Tensor:
    """Return a number that depends on every output, as a loss does."""
    input_ids = torch.zeros(batch.rows, batch.width, dtype=torch.long)
    positions = torch.zeros(batch.rows * batch.asked, dtype=torch.long)
    if isinstance(model, ScalarHeadModel):
        return model(input_ids, positions).sum()  # type: ignore[no-any-return]
    asked = torch.zeros_like(positions)
    found = model(input_ids, positions, asked, 1.0, with_entropy, None, teaching)
    parts = (found.logprobs, found.entropy, found.divergence)
    return sum(part.sum() for part in parts if part is not None)  # type: ignore[return-value]


@contextmanager
def tracked(root: nn.Module) -> Iterator[Tracker]:
    """Count what is allocated beside the weights of the fake model `root`."""
    # transformers reads numbers to see that no row holds two texts; fake tensors have none.
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_: None
    try:
        mode = cast(FakeTensor, next(root.parameters())).fake_mode  # tensors were made in it
        with mode, Tracker(root) as tracker:
            yield tracker
    finally:
        masking_utils.find_packed_sequence_indices = found


def autocast(style: Style) -> AbstractContextManager[Any]:
    """Return the precision of forwards, as the Trainer sets it."""
    if not style.autocast:
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


@contextmanager
def layers_marked(
    model: PolicyModel | ScalarHeadModel, tracker: Tracker, prefix: str = ""
) -> Iterator[None]:
    """Name the segments: before the layers, first and last layer, head; the same backwards."""
    # The longest list of modules, as for sharding.
    lists = [list(m) for m in model.root.modules() if isinstance(m, nn.ModuleList)]
    layers: list[nn.Module] = max(lists, key=len, default=[])
    places = ["first", *["between"] * (len(layers) - 2), "last"][-len(layers) :]
    backward = False

    def begin(index: int) -> None:
        if not backward:
            tracker.enter(f"{prefix}layer {places[index]}")

    def end(index: int, output: Any) -> None:
        if backward:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: gradient(index))
        if index + 1 == len(layers):
            tracker.enter(f"{prefix}head", HEAD)

    def gradient(index: int) -> None:
        nonlocal backward
        backward = True
        tracker.enter(f"{prefix}backward of layer {places[index]}")

    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(lambda *_, i=index: begin(i)))
        handles.append(layer.register_forward_hook(lambda *a, i=index: end(i, a[-1])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def optimizer_peaks(model: nn.Module, build: Callable[[Any], torch.optim.Optimizer]) -> Peaks:
    """Return the state that an optimizer keeps, and what its step holds beside it."""
    with tracked(model) as tracker:
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
            tracker.forget(parameter.grad)
        optimizer = build([{"params": trained, "lr": 1e-4}])
        optimizer.step()
        tracker.enter("state")
        tracker.enter("step")
        optimizer.step()
        del optimizer
        model.zero_grad(set_to_none=True)
        return dict(tracker.peaks)


def generation_peaks(
    model: PolicyModel, rows: int, prompt: int, new_tokens: int, style: Style, *, read_at_once: int
) -> Peaks:
    """Return the memory of the cached generator, without its copies of weights.

    Args:
        model: a fake model.
        rows: number of responses at once.
        prompt: tokens of each prompt.
        new_tokens: tokens of each response.
        style: precision and compute dtype.
        read_at_once: largest number of prompt tokens in one forward.
    """
    with tracked(model.root) as tracker, torch.no_grad(), autocast(style):
        with model.generating() as network, _linears_cast(network, style, tracker):

            def enter(step: str) -> None:
                if step == "prompts":
                    tracker.peaks.clear()  # of making room
                tracker.enter(step, HEAD if step == "sampling" else ACTIVATIONS)

            sizes = (rows, prompt, new_tokens, style)
            generate(network, *sizes, read_at_once=read_at_once, enter=enter, tracker=tracker)
        return dict(tracker.peaks)


def generate(
    network: PreTrainedModel,
    rows: int,
    prompt: int,
    new_tokens: int,
    style: Style,
    *,
    read_at_once: int,
    enter: Callable[[str], None],
    tracker: Tracker,
) -> None:
    """Run the steps of generation that need most: the last prompts, the last token, its sampling.

    Args:
        network: a fake model.
        rows: number of responses at once.
        prompt: tokens of each prompt.
        new_tokens: tokens of each response.
        style: precision and compute dtype.
        read_at_once: largest number of prompt tokens in one forward.
        enter: called with the name of each step.
        tracker: counts the bytes.
    """
    together = min(max(read_at_once // prompt, 1), rows)
    length = prompt + new_tokens
    cache = InPlaceCache(network.config, slots=rows, prompt_columns=prompt, max_columns=length)
    cache.use(first_row=0, rows=rows, start=0, end=0)  # room is made for the rows in use
    cache.reserve(length)
    _generation_step(network, cache, 1, past=0, length=1)  # makes the cache's room
    for layer in cache.in_place:
        tracker.relabel(layer.keys, CACHE)
        tracker.relabel(layer.values, CACHE)
    # All prompts but the last few are read already: their logits wait.
    vocabulary = int(network.get_output_embeddings().weight.shape[0])  # type: ignore[operator,union-attr]
    waiting = torch.empty(rows - together, vocabulary, dtype=style.matmul_dtype)
    tracker.relabel(waiting, HEAD)
    enter("prompts")
    _generation_step(network, cache, together, past=0, length=prompt)
    del waiting
    enter("tokens")
    logits = _generation_step(network, cache, rows, past=length - 1, length=1)
    enter("sampling")
    sample_unchecked(logits, torch.zeros(rows, dtype=torch.float64), temperature=1.0)


def _generation_step(network: Any, cache: Any, rows: int, *, past: int, length: int) -> Tensor:
    cache.use(first_row=0, rows=rows, start=0, end=past)
    output = network(
        input_ids=torch.zeros(rows, length, dtype=torch.long),
        attention_mask=torch.ones(rows, past + length, dtype=torch.long),
        position_ids=torch.zeros(rows, length, dtype=torch.long),
        use_cache=True,
        logits_to_keep=1,
        **cache_argument(network, cache),
    )
    return output.logits[:, -1]  # type: ignore[no-any-return]


@contextmanager
def _linears_cast(network: nn.Module, style: Style, tracker: Tracker) -> Iterator[None]:
    """Give linear layers the forward of the generator's prepared weights, whose bytes are ours."""
    dtype = style.matmul_dtype
    changed = [m for m in network.modules() if isinstance(m, nn.Linear | Conv1D)]

    def cast_linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))

    for module in changed:
        weight = module.weight.detach().to(dtype)
        weight = weight.t() if isinstance(module, Conv1D) else weight
        tracker.forget(weight)
        module.forward = partial(cast_linear, weight, module.bias)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in changed:
            del module.forward
