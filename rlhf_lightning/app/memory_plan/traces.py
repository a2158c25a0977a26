"""Peaks of the passes of one model: training, and a forward without a graph.

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
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from rlhf_lightning.app.memory_plan.fake_models import Style, fake_mode_of
from rlhf_lightning.app.memory_plan.tracker import GRADIENTS, HEAD, Bytes, Tracker
from rlhf_lightning.models.cpu.weight_cache import keeping_rounded_weights
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel

Peaks = Mapping[str, Bytes]  # segment -> category -> bytes
FEW, MORE = 2, 3  # layers that are counted


@dataclass(frozen=True)
class Rows:
    """A micro-batch: rows of one padded width, of which some positions are asked about."""

    rows: int
    width: int
    asked: int  # positions a row


def extrapolated(measure: Callable[[int], Peaks], num_layers: int) -> dict[str, dict[str, int]]:
    """Return `measure(num_layers)`, from counts with few layers."""
    if num_layers <= MORE:
        return {segment: dict(live) for segment, live in measure(num_layers).items()}
    few, more = measure(FEW), measure(MORE)
    return {
        segment: {
            category: live.get(category, 0)
            + (num_layers - FEW) * (more[segment].get(category, 0) - live.get(category, 0))
            for category in {*live, *more[segment]}
        }
        for segment, live in few.items()
    }


def largest(peaks: Peaks) -> dict[str, int]:
    """Return the segment in which most is alive."""
    best = max(peaks.values(), key=lambda live: sum(live.values()))
    return {category: size for category, size in best.items() if size > 0}


def training_peaks(
    model: PolicyModel | ScalarHeadModel,
    batch: Rows,
    style: Style,
    *,
    accumulated: bool,
    in_place: bool,
    with_entropy: bool = False,
) -> Peaks:
    """Return what a forward and backward pass holds, gradients included.

    Args:
        model: a skeleton.
        batch: the micro-batch.
        style: precision and compute dtype.
        accumulated: gradients of a micro-batch before are there already.
        in_place: gradients go straight into `.grad` where they can, see `weight_gradients`.
        with_entropy: the loss has an entropy bonus.
    """
    with tracked(model.root) as tracker:
        trained = [p for p in model.parameters() if p.requires_grad]
        # A weight with a hook is left to autograd.
        hooks = [
            p.register_post_accumulate_grad_hook(lambda p: tracker.relabel(p.grad, GRADIENTS))  # type: ignore[arg-type]
            for p in (() if in_place else trained)
        ]
        tracker.before_peak = partial(_gradients_named, tracker, trained)
        for parameter in trained if accumulated else ():
            parameter.grad = torch.empty_like(parameter)
            tracker.relabel(parameter.grad, GRADIENTS)
        tracker.peaks.clear()
        tracker.enter("embeddings")
        with layers_marked(model, tracker), autocast(style), keeping_rounded_weights():
            loss = loss_of(model, batch, with_entropy)
            tracker.enter("loss", HEAD)
            loss.backward()
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
        return dict(tracker.peaks)


def _gradients_named(tracker: Tracker, trained: list[nn.Parameter]) -> None:
    for parameter in trained:
        if parameter.grad is not None:
            tracker.relabel(parameter.grad, GRADIENTS)


def forward_peaks(
    model: PolicyModel | ScalarHeadModel,
    batch: Rows,
    style: Style,
    *,
    with_entropy: bool = True,
    several: bool = False,
) -> Peaks:
    """Return what a forward pass without a graph holds.

    Args:
        model: a skeleton.
        batch: rows of the forward.
        style: precision and compute dtype.
        with_entropy: of the policy's distribution.
        several: it is one of several, for which rounded weights are kept.
    """
    kept = keeping_rounded_weights() if several else nullcontext()
    with tracked(model.root) as tracker, torch.no_grad(), autocast(style), kept:
        with layers_marked(model, tracker):
            loss_of(model, batch, with_entropy)
        return dict(tracker.peaks)


def loss_of(model: PolicyModel | ScalarHeadModel, batch: Rows, with_entropy: bool) -> Tensor:
    """Return a number that depends on every output, as a loss does."""
    input_ids = torch.zeros(batch.rows, batch.width, dtype=torch.long)
    positions = torch.zeros(batch.rows * batch.asked, dtype=torch.long)
    if isinstance(model, ScalarHeadModel):
        return model(input_ids, positions).sum()  # type: ignore[no-any-return]
    statistics = model(input_ids, positions, torch.zeros_like(positions), 1.0, with_entropy)
    entropy = statistics.entropy
    return statistics.logprobs.sum() + (0 if entropy is None else entropy.sum())  # type: ignore[no-any-return]


@contextmanager
def tracked(root: nn.Module) -> Iterator[Tracker]:
    """Count what is allocated beside the weights of skeleton `root`."""
    # transformers reads numbers to see that no row holds two texts; fake tensors have none.
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_: None
    try:
        with fake_mode_of(root), Tracker(root) as tracker:
            yield tracker
    finally:
        masking_utils.find_packed_sequence_indices = found


def autocast(style: Style) -> AbstractContextManager[Any]:
    """Return the precision of forwards, as the Trainer sets it."""
    if not style.autocast:
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: the longest list of modules, as for sharding."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


@contextmanager
def layers_marked(model: PolicyModel | ScalarHeadModel, tracker: Tracker) -> Iterator[None]:
    """Name the segments: before the layers, first and last layer, head; the same backwards."""
    layers = decoder_layers(model.root)
    backward = False

    def begin(index: int) -> None:
        if not backward:
            tracker.enter(f"layer {_place(index, len(layers))}")

    def end(index: int, output: Any) -> None:
        if backward:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: gradient(index))
        if index + 1 == len(layers):
            tracker.enter("head", HEAD)

    def gradient(index: int) -> None:
        nonlocal backward
        backward = True
        tracker.enter(f"backward of layer {_place(index, len(layers))}")

    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(lambda *_, i=index: begin(i)))
        handles.append(layer.register_forward_hook(lambda *a, i=index: end(i, a[-1])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _place(index: int, count: int) -> str:
    return "last" if index + 1 == count else "first" if index == 0 else "between"


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
