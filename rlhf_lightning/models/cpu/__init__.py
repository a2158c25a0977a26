"""Kernels of models on a CPU, see README.md; `models.cpu_kernels` alone imports them."""

from transformers import PreTrainedModel

from rlhf_lightning.models.cpu.attention import use_short_attention
from rlhf_lightning.models.cpu.llama_layer import use_fused_layers
from rlhf_lightning.models.cpu.weight_grads import use_rows_embedding


def prepare(model: PreTrainedModel, *, adapted: bool) -> None:
    """Let `model` compute by the kernels of this folder, in place; see `models.cpu_kernels`."""
    use_short_attention(model)
    if not adapted:
        use_fused_layers(model)
        use_rows_embedding(model)
