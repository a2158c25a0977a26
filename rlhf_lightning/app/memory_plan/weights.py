"""How many bytes the weights of a model take, by how they are held."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

FROZEN, TRAINED, ELEMENTS, COPIES = "frozen", "trained", "elements", "copies"
LARGEST = "largest"  # the matrix of most elements
# 4-bit numbers, and for every 64 of them one 8-bit constant and its share of a second one
# (Dettmers et al. 2023, section 3): 0.127 bits a weight beside the 4.
NF4_BYTES = (4 + 0.127) / 8


def weight_bytes(
    model: nn.Module,
    *,
    compute_dtype: torch.dtype,
    device: str,
    nf4: bool = False,
    frozen_only: bool = False,
) -> Counter[str]:
    """Return what the parameters of `model` take, each counted once.

    Args:
        model: on any device.
        compute_dtype: of its matrix products.
        device: where generation will run.
        nf4: frozen matrices but the head's are held in 4 bits.
        frozen_only: leave out what is trained, such as adapters on a frozen base.

    Returns:
        Bytes of `frozen` and of `trained` weights, number of `elements`, elements of the `largest`
        one, and bytes of the `copies` that generation makes (`linear_weights_prepared`).
    """
    counts: Counter[str] = Counter()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    matrices = {
        id(m.weight): m
        for m in model.modules()
        if isinstance(m, nn.Linear | Conv1D) and isinstance(m.weight, torch.Tensor)
    }
    for parameter in {id(p): p for p in model.parameters()}.values():
        if frozen_only and parameter.requires_grad:
            continue
        size: float = parameter.dtype.itemsize
        matrix = matrices.get(id(parameter))
        if nf4 and matrix not in (None, head) and not parameter.requires_grad:
            size = NF4_BYTES
        counts[TRAINED if parameter.requires_grad else FROZEN] += round(parameter.numel() * size)
        counts[ELEMENTS] += parameter.numel()
        counts[LARGEST] = max(counts[LARGEST], parameter.numel())
        # On a CPU every matrix is packed as oneDNN reads it; elsewhere it may only need a cast.
        plain = parameter.dtype == compute_dtype and isinstance(matrix, nn.Linear)
        if matrix is not None and size >= 1 and (device == "cpu" or not plain):
            counts[COPIES] += parameter.numel() * compute_dtype.itemsize
    return counts
