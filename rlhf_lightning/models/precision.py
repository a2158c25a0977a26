"""What frozen weights may be rounded to without changing a bit of what is computed."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.models.release import release_freed_memory

MIXED_BF16 = "bf16-mixed"


def round_frozen_weights(model: PreTrainedModel, precision: str) -> None:
    """Hold the matrices of frozen `model` in the dtype that autocast would cast them to, in place.

    Under `bf16-mixed` autocast rounds the weights of every matrix product to bf16 in each forward.
    Rounded once, they give the same bits at half the memory and without the casts. Embeddings,
    norms and the output head, which may be tied to the embeddings, stay as they are.

    Args:
        model: whose decoder's `Linear` and `Conv1D` modules are rounded.
        precision: the Trainer's; anything but `bf16-mixed` changes nothing.
    """
    if precision != MIXED_BF16:
        return
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            for name, parameter in list(module.named_parameters(recurse=False)):
                rounded = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
                setattr(module, name, rounded)
    for parameter in model.parameters():
        if parameter.dtype != torch.bfloat16:
            # What was read from a file may be a view of it, which would hold all of it in memory.
            parameter.data = parameter.data.clone()
    release_freed_memory()
