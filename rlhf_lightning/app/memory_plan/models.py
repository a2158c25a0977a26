"""Fake models of a run: the real modules without numbers, with as few layers as asked.

They are put together as the factories in `models` do it, but from a shape instead of a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.app.memory_plan.passes import FEW, MORE, Peaks, extrapolated
from rlhf_lightning.app.memory_plan.run import Run, Shape
from rlhf_lightning.functional.linear_logprobs import sized_for
from rlhf_lightning.models.activation_checkpointing import checkpoint_activations
from rlhf_lightning.models.cpu_kernels import cpu_kernels
from rlhf_lightning.models.factory import frozen
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel, scalar_head
from rlhf_lightning.models.lora import AdaptedBase, add_policy, add_scalar_model
from rlhf_lightning.models.ppo_models import freeze_but
from rlhf_lightning.models.precision import round_frozen_weights

POLICY, VALUE, REFERENCE, REWARD = "policy", "value", "reference", "reward"
TEACHER = "teacher"
FROZEN, TRAINED, ELEMENTS, COPIES = "frozen", "trained", "elements", "copies"
LARGEST = "largest"  # the matrix of most elements
# 4-bit numbers, and for every 64 of them one 8-bit constant and its share of a second one
# (Dettmers et al. 2023, section 3): 0.127 bits a weight beside the 4.
NF4_BYTES = (4 + 0.127) / 8
# Kept for the whole process: a suggestion that changes only the batch measures the same models.
_MADE: dict[tuple[Any, ...], Any] = {}


class FakeModels:
    """The models of one run, and what is measured on them."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def shape_of(self, kind: str) -> Shape:
        """Return the shape of a model; reward model and teacher may have a different one."""
        own = {REWARD: self.run.scoring.shape, TEACHER: self.run.teacher}.get(kind)
        return own or self.run.shape

    def peak(
        self, kind: str, measure: Callable[..., Peaks], *args: Any, **kwargs: Any
    ) -> Counter[str]:
        """Return the largest peak of `measure(model, ...)` by category, at the full depth."""
        found: dict[str, Any] = self.peaks(kind, lambda model: measure(model, *args, **kwargs))
        return +Counter(max(found.values(), key=lambda live: sum(live.values())))

    def peaks(
        self, kind: str, measure: Callable[[Any], Peaks], *, as_held: bool = False
    ) -> dict[str, dict[str, int]]:
        """Return `measure(model)` segment by segment, at the model's full depth.

        Args:
            kind: kind of model.
            measure: measures a fake model.
            as_held: with weights as they are held, not as FSDP2 gathers them.
        """
        depth = self.shape_of(kind).num_layers
        with sized_for(self.run.device):
            return extrapolated(lambda layers: measure(self._model(kind, layers, as_held)), depth)

    def weights(self, kind: str, *, base: bool = False) -> Counter[str]:
        """Return bytes and counts of the parameters of a model at its full depth.

        Args:
            kind: kind of model.
            base: count the frozen base that adapters share, not the model's parameters.

        Returns:
            Bytes of `frozen` and of `trained` weights, number of `elements`, elements of the
            `largest` one, and bytes of the `copies` that generation makes
            (`linear_weights_prepared`).
        """
        key = ("weights", base, *self._key(kind))
        if key not in _MADE:
            depth = self.shape_of(kind).num_layers
            found = extrapolated(lambda layers: {"": self._count(kind, layers, base)}, depth)
            _MADE[key] = Counter(found[""])
        return _MADE[key]  # type: ignore[no-any-return]

    def total(self, kind: str, entry: str = ELEMENTS) -> int:
        """Return an entry of `weights` of a model and, under LoRA, of its base."""
        return sum(self.weights(kind, base=base)[entry] for base in self._bases)

    def layer_elements(self, kind: str) -> int:
        """Return the number of weights of one decoder layer, adapters included."""
        few, more = (
            sum(self._count(kind, layers, base)[ELEMENTS] for base in self._bases)
            for layers in (FEW, MORE)
        )
        return more - few

    @property
    def _bases(self) -> tuple[bool, ...]:
        return (False,) if self.run.style.lora is None else (False, True)

    def _model(self, kind: str, num_layers: int, as_held: bool) -> Any:
        dtype = None if as_held else self.run.style.compute_dtype
        key = (num_layers, dtype, *self._key(kind))
        if key not in _MADE:
            # Fake tensors are on a CPU, always.
            with cpu_kernels(self.run.device == "cpu"):
                model = self.build(kind, num_layers)
            _make_fake(model.root, dtype)
            _MADE[key] = model
        return _MADE[key]

    def _key(self, kind: str) -> tuple[Any, ...]:
        fields = repr(sorted(self.shape_of(kind).fields.items()))
        dtype = self.run.scoring.dtype if kind == REWARD else None
        return kind, fields, self.run.style, dtype, self.run.device

    def build(self, kind: str, num_layers: int) -> Any:
        """Return a model on the meta device, as `load_policy` and its siblings make it."""
        model = self._built(kind, num_layers)
        if kind == VALUE:
            freeze_but(model, self.run.style.value_trainable)
        return model

    def _built(self, kind: str, num_layers: int) -> Any:
        style, trained = self.run.style, kind in (POLICY, VALUE)
        config = self.shape_of(kind).config(num_layers)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        if trained and style.lora is not None:
            checkpointing = style.activation_checkpointing
            base = AdaptedBase(model, style.lora, activation_checkpointing=checkpointing)
            with torch.device("meta"):
                if kind == POLICY:
                    return add_policy(base, "policy", seed=0)
                return add_scalar_model(base, "reward", init_std=0.0, seed=0)
        scalar = kind in (VALUE, REWARD)
        if trained and style.activation_checkpointing:
            checkpoint_activations(model.base_model if scalar else model)
        if scalar:
            hidden_size = int(model.get_output_embeddings().weight.shape[1])
            with torch.device("meta"):
                head = scalar_head(hidden_size, init_std=0.0)
            model = ScalarHeadModel(model.base_model, head).train()
        else:
            model = PolicyModel(model)
        if trained:
            return model
        frozen(model)
        if scalar and self.run.scoring.dtype is not None:
            return model.to(self.run.scoring.dtype)
        round_frozen_weights(model.trunk if scalar else model.model, style.precision)
        return model

    def _count(self, kind: str, num_layers: int, base: bool) -> Counter[str]:
        """Return `weights` of a model as it is held: under FSDP2 fake ones are as gathered."""
        style = self.run.style
        nf4 = style.lora is not None and style.lora.quantization == "nf4"
        dtype = style.matmul_dtype
        model = self.build(kind, num_layers)
        model = model.root.model if base else model
        head = getattr(model, "get_output_embeddings", lambda: None)()
        matrices = {
            id(m.weight): m
            for m in model.modules()
            if isinstance(m, nn.Linear | Conv1D) and isinstance(m.weight, torch.Tensor)
        }
        counts: Counter[str] = Counter()
        for parameter in {id(p): p for p in model.parameters()}.values():
            if base and parameter.requires_grad:  # an adapter
                continue
            size: float = parameter.dtype.itemsize
            matrix = matrices.get(id(parameter))
            if nf4 and matrix not in (None, head) and not parameter.requires_grad:
                size = NF4_BYTES
            held = TRAINED if parameter.requires_grad else FROZEN
            counts[held] += round(parameter.numel() * size)
            counts[ELEMENTS] += parameter.numel()
            counts[LARGEST] = max(counts[LARGEST], parameter.numel())
            # On a CPU every matrix is packed as oneDNN reads it; elsewhere it may need a cast.
            plain = parameter.dtype == dtype and isinstance(matrix, nn.Linear)
            if matrix is not None and size >= 1 and (self.run.device == "cpu" or not plain):
                counts[COPIES] += parameter.numel() * dtype.itemsize
        return counts


def _make_fake(root: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace what `root` holds on the meta device by fake CPU tensors, in place.

    Args:
        root: parameters that it holds twice (tied ones) stay one.
        dtype: dtype of floating-point parameters; None keeps each as it is.
    """
    made: dict[int, Any] = {}

    def fake(tensor: Any) -> Any:
        parameter = isinstance(tensor, nn.Parameter)
        changes = parameter and dtype is not None and tensor.is_floating_point()
        empty = torch.empty(tensor.shape, dtype=dtype if changes else tensor.dtype, device="cpu")
        return nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty

    with FakeTensorMode():
        for module in root.modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        store[name] = cast(Any, made.setdefault(id(tensor), fake(tensor)))
