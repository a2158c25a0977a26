"""What an update allocates and frees, in order, for a model of any depth.

Few layers are traced. All of them but the outer two at each end allocate alike, so the deeper
model's order is that of the few with the middle one repeated: forwards on the way to the loss,
backwards on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_lightning.memory.skeletons import Style
from rlhf_lightning.memory.traces import Rows, autocast, layers_marked, loss_of, tracked
from rlhf_lightning.memory.tracker import FREED, NODE, Place, Tracker
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.rounded_weights import keeping_rounded_weights

LAYERS = 5  # that are traced
MIDDLE = 2  # the one that is repeated
FIRST, LATER, END = "first micro-batch", "later micro-batch", "end of a term of the loss"
RELEASE = "release of gradients"
FIRST_STEP, STEP = "first step", "step"


Key = tuple[Place, int]  # where something was allocated, and the how manieth of that place it was


@dataclass(frozen=True)
class Freed:
    """That what was allocated there is freed."""

    key: Key


Entry = int | Freed  # the size of a tensor in bytes, or NODE; or what is freed


@dataclass(frozen=True)
class Recording:
    """The blocks of an update of one model, as traced.

    Args:
        blocks: name -> what was allocated and freed, place by place.
        layers: that were traced.
        depth: of the model.
    """

    blocks: Mapping[str, Sequence[tuple[Place, Sequence[Entry]]]]
    layers: int
    depth: int

    def entries(self, block: str) -> Iterator[tuple[int, Key] | list[Key]]:
        """Yield size and key of each allocation of a block, and the keys of what is freed."""
        for place, traced, log in self._places(self.blocks[block]):
            count = 0
            for entry in log:
                if isinstance(entry, Freed):
                    yield self._resolved(entry.key, traced, place)
                else:
                    yield entry, (place, count)
                    count += entry != NODE

    def _places(
        self, block: Sequence[tuple[Place, Sequence[Entry]]]
    ) -> Iterator[tuple[Place, Place, Sequence[Entry]]]:
        """Yield place in the deep model, place in the traced one, and log."""
        for traced, log in block:
            layers: Sequence[int | None] = [None]
            if traced.layer is not None:
                layers = self._copies(traced.layer)
                if traced.name == "backward":
                    layers = layers[::-1]
            for layer in layers:
                yield Place(traced.block, traced.name, layer), traced, log

    def _copies(self, layer: int) -> Sequence[int]:
        more = self.depth - self.layers
        if layer == MIDDLE:
            return range(MIDDLE, MIDDLE + more + 1)
        return [layer if layer < MIDDLE else layer + more]

    def _resolved(self, key: Key, traced: Place, place: Place) -> list[Key]:
        origin, number = key
        if origin.layer is None:
            return [key]
        if place.layer is not None and traced.layer is not None:
            layers: Sequence[int] = [place.layer + origin.layer - traced.layer]
        else:
            layers = self._copies(origin.layer)
        return [(Place(origin.block, origin.name, layer), number) for layer in layers]


def record_update(
    model: PolicyModel | ScalarHeadModel,
    batch: Rows,
    style: Style,
    *,
    layers: int,
    depth: int,
    accumulated: bool,
    with_entropy: bool,
) -> Recording:
    """Return what the micro-batches of an update allocate and free, and letting gradients go.

    Args:
        model: a skeleton.
        batch: the micro-batch.
        style: precision and compute dtype.
        layers: of the skeleton.
        depth: of the model that it stands for.
        accumulated: a step takes several micro-batches.
        with_entropy: the loss has an entropy bonus.
    """
    with tracked(model.root) as tracker:
        with keeping_rounded_weights():
            for block in (FIRST, LATER) if accumulated else (FIRST,):
                tracker.block = block
                tracker.mark("begin")
                with layers_marked(model, tracker), autocast(style):
                    tracker.graph = True
                    loss = loss_of(model, batch, with_entropy)
                    tracker.graph = False
                    loss.backward()
                tracker.mark("end")
                del loss
            tracker.block = END
            tracker.mark("all")
        tracker.block = RELEASE
        tracker.mark("all")
        model.zero_grad(set_to_none=True)
        return Recording(_by_place(tracker), layers, depth)


def record_steps(
    model: torch.nn.Module, build: Callable[[Any], torch.optim.Optimizer]
) -> Recording:
    """Return what the optimizer's first step and a later one allocate and free.

    Args:
        model: a skeleton of full depth.
        build: parameter groups -> optimizer.
    """
    with tracked(model) as tracker:
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
            tracker.forget(parameter.grad)
        tracker.block = FIRST_STEP
        tracker.mark("all")
        optimizer = build([{"params": trained, "lr": 1e-4}])
        optimizer.step()
        tracker.block = STEP
        tracker.mark("all")
        optimizer.step()
        blocks = _by_place(tracker)
        model.zero_grad(set_to_none=True)
        return Recording(blocks, 0, 0)


def _by_place(tracker: Tracker) -> dict[str, list[tuple[Place, list[Entry]]]]:
    """Return the log cut at its marks, what is freed named by where it was allocated."""
    known: dict[int, Key] = {}
    blocks: dict[str, list[tuple[Place, list[Entry]]]] = {}
    ends = [position for position, _ in tracker.marks[1:]] + [len(tracker.log)]
    for (begin, place), end in zip(tracker.marks, ends, strict=True):
        entries: list[Entry] = []
        count = 0
        for entry, number in tracker.log[begin:end]:
            if entry >= 0:
                known[number] = (place, count)
                count += 1
            if entry != FREED:
                entries.append(entry)
            elif number in known:
                entries.append(Freed(known[number]))
        blocks.setdefault(place.block, []).append((place, entries))
    return blocks
