"""What FSDP2 holds whole for a while of what it shards."""

from __future__ import annotations

from collections import Counter

from rlhf_lightning.app.memory_plan.weights import ELEMENTS
from rlhf_lightning.app.memory_plan.workbench import Workbench, compute_dtype

GATHERED = "gathered weights"


def gathered(bench: Workbench, kinds: tuple[str, ...], *, backward: bool) -> Counter[str]:
    """Return what FSDP2 gathers: all but the layers for good, layers as they are needed.

    One layer computes, the next one is on its way, and its flat copy is alive meanwhile; in the
    backward pass a layer's gradients are there whole, once as computed and once in fp32 to be sent,
    and the head's wait for those of the embeddings.
    """
    run = bench.run
    if run.sharded == 1:
        return Counter()
    size = compute_dtype(run.style).itemsize
    gradients = backward and run.style.lora is None  # those of adapters are small
    rest = sum(outside_layers(bench, kind) for kind in kinds)
    layer = max(bench.layer_elements(kind) for kind in kinds)
    total = rest * (size + size * gradients)
    total += layer * (3 * size + (size + 4) * gradients)
    return Counter({GATHERED: total})


def end_of_backward(bench: Workbench, kind: str) -> Counter[str]:
    """Return what is whole when the last gradients, of embeddings and head, are sent."""
    if bench.run.style.lora is not None:
        return Counter()
    size = compute_dtype(bench.run.style).itemsize
    return Counter({GATHERED: outside_layers(bench, kind) * (2 * size + 4)})


def outside_layers(bench: Workbench, kind: str) -> int:
    """Return the weights of a model that are in no decoder layer."""
    elements = sum(bench.weights(kind, part=part)[ELEMENTS] for part in bench.parts)
    return elements - bench.shape_of(kind).num_layers * bench.layer_elements(kind)
