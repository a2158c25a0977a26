"""Models without numbers: the real modules, made of fake tensors, with as few layers as asked.

They are put together as the factories in `models` do it, but from a shape instead of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rlhf_lightning.app.memory_plan.shapes import Shape
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.activation_checkpointing import checkpoint_activations
from rlhf_lightning.models.cpu.attention import NAME
from rlhf_lightning.models.cpu.llama_layer import FusedLlamaDecoderLayer
from rlhf_lightning.models.cpu.weight_grads import PLAIN_WEIGHTS, RowsEmbedding
from rlhf_lightning.models.factory import frozen
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel, scalar_head
from rlhf_lightning.models.lora import AdaptedBase, AdaptedPolicy, add_policy, add_scalar_model
from rlhf_lightning.models.precision import round_frozen_weights

# A skeleton's weights are as plain as those they stand for.
PLAIN_WEIGHTS.add(FakeTensor)
# What models are on a CPU, and what they are elsewhere.
ON_A_CPU: dict[type, type] = {
    FusedLlamaDecoderLayer: LlamaDecoderLayer,
    RowsEmbedding: nn.Embedding,
}


@dataclass(frozen=True)
class Style:
    """How models are held and computed.

    Args:
        precision: the Trainer's, `32-true` or `bf16-mixed`.
        compute_dtype: of gathered weights under FSDP2; None computes in the weights' own.
        lora: adapters on one frozen base, or None for full fine-tuning.
        activation_checkpointing: of trained models.
    """

    precision: str
    compute_dtype: torch.dtype | None = None
    lora: LoraHparams | None = None
    activation_checkpointing: bool = False

    @property
    def autocast(self) -> bool:
        """Whether forwards run under autocast in bf16."""
        return self.precision == "bf16-mixed"


def causal_model(shape: Shape, num_layers: int) -> Any:
    """Return a causal language model on the meta device, fp32."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape.config(num_layers), dtype=torch.float32)


def policy(shape: Shape, num_layers: int, style: Style) -> PolicyModel:
    """Return a policy in training, as `load_policy` makes it."""
    if style.lora is not None:
        with torch.device("meta"):
            return add_policy(_base(shape, num_layers, style), "policy", seed=0)
    model = causal_model(shape, num_layers)
    if style.activation_checkpointing:
        checkpoint_activations(model)
    return PolicyModel(model.train())


def scalar_model(shape: Shape, num_layers: int, style: Style) -> ScalarHeadModel:
    """Return a reward or value model in training, as `load_scalar_model` makes it."""
    if style.lora is not None:
        base = _base(shape, num_layers, style)
        with torch.device("meta"):
            return add_scalar_model(base, "reward", init_std=0.0, seed=0)
    return _scalar(shape, num_layers, style.activation_checkpointing)


def reference(shape: Shape, num_layers: int, style: Style) -> PolicyModel:
    """Return the frozen reference of full fine-tuning."""
    model = frozen(PolicyModel(causal_model(shape, num_layers)))
    round_frozen_weights(model.model, style.precision)
    return model


def reward_model(
    shape: Shape, num_layers: int, style: Style, dtype: torch.dtype | None
) -> ScalarHeadModel:
    """Return a frozen reward model: rounded for autocast, or wholly in `dtype`."""
    model = frozen(_scalar(shape, num_layers, False))
    if dtype is None:
        round_frozen_weights(model.trunk, style.precision)
    return model if dtype is None else model.to(dtype)


def ppo_adapters(
    shape: Shape, num_layers: int, style: Style, *, with_reward: bool
) -> tuple[AdaptedPolicy, ScalarHeadModel, ScalarHeadModel | None]:
    """Return policy, value model and, if asked for, reward model on one base."""
    base = _base(shape, num_layers, style)
    with torch.device("meta"):
        the_policy = add_policy(base, "policy", seed=0)
        value = add_scalar_model(base, "value", init_std=0.0, seed=0)
        if not with_reward:
            return the_policy, value, None
        reward = add_scalar_model(base, "reward", init_std=0.0, seed=0)
    return the_policy, value, reward.requires_grad_(False)


def _base(shape: Shape, num_layers: int, style: Style) -> AdaptedBase:
    assert style.lora is not None
    return AdaptedBase(
        causal_model(shape, num_layers),
        style.lora,
        activation_checkpointing=style.activation_checkpointing,
    )


def _scalar(shape: Shape, num_layers: int, activation_checkpointing: bool) -> ScalarHeadModel:
    model = causal_model(shape, num_layers)
    if activation_checkpointing:
        checkpoint_activations(model.base_model)
    hidden_size = int(model.get_output_embeddings().weight.shape[1])
    with torch.device("meta"):
        head = scalar_head(hidden_size, init_std=0.0)
    return ScalarHeadModel(model.base_model, head).train()


def as_on_a_gpu(root: nn.Module) -> None:
    """Take back what models do on a CPU alone: fake tensors are on one, whatever is planned."""
    for module in root.modules():
        if type(module) in ON_A_CPU:
            module.__class__ = ON_A_CPU[type(module)]
        elif isinstance(module, PreTrainedModel) and module.config._attn_implementation == NAME:
            module.set_attn_implementation("sdpa")


def made_fake(root: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace what `root` holds on the meta device by fake CPU tensors, in place.

    Args:
        root: parameters that it holds twice (tied ones) stay one.
        dtype: of floating-point parameters; None keeps each its own.
    """
    made: dict[int, Any] = {}
    with FakeTensorMode():
        for module in root.modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        store[name] = made.setdefault(id(tensor), _fake(tensor, dtype))


def fake_mode_of(root: nn.Module) -> FakeTensorMode:
    """Return the mode in which the tensors of `root` were made, and must be used."""
    return cast(FakeTensor, next(root.parameters())).fake_mode


def _fake(tensor: Any, dtype: torch.dtype | None) -> Any:
    parameter = isinstance(tensor, nn.Parameter)
    changes = parameter and dtype is not None and tensor.is_floating_point()
    fake = torch.empty(tensor.shape, dtype=dtype if changes else tensor.dtype, device="cpu")
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if parameter else fake
