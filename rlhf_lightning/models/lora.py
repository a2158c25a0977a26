"""Low-rank adapters: several models that share the weights of one frozen base.

`AdaptedBase` holds a causal language model whose weights never change, and named adapters of which
a call switches on one or none. `AdaptedPolicy` and `AdaptedScalarModel` are views of it: they look
like the full models, but their parameters and their state dict are the adapter
(and head) alone. With the adapters off the base is the reference, without a second copy.

The base is deliberately no submodule of its views: it is in no checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.attention import expect_varying_shapes
from rlhf_lightning.models.building import checkpoint_activations, in_eval_mode, seeded_init
from rlhf_lightning.models.cpu_kernels import prepare
from rlhf_lightning.models.heads import (
    PolicyModel,
    ScalarHeadModel,
    TokenStatistics,
    check_head_split,
    scalar_head,
)
from rlhf_lightning.models.loading import warn_once
from rlhf_lightning.models.precision import computing, round_frozen_weights

T = TypeVar("T")
ALL_LINEAR = "all-linear"


class AdaptedBase(nn.Module):
    """A frozen causal language model with named adapters, of which at most one is on.

    Args:
        model: the base; its weights are frozen and, by `lora.base_precision`, rounded in place.
        lora: rank, scale and targets of new adapters.
        activation_checkpointing: compute decoder layers again in the backward pass.

    Attributes:
        hidden_size: H, of the states that the heads read.
        targets: full paths of the modules that get an adapter.
        experts: names of the parameters that hold a mixture's experts, which get none.
    """

    def __init__(
        self, model: PreTrainedModel, lora: LoraHparams, *, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        prepare(model, adapted=True)
        expect_varying_shapes()
        check_head_split(model)
        self.lora = lora
        self.targets = target_modules(model, lora.target_modules)
        self.experts = experts_of(model)
        if self.experts:
            found = f"{type(model).__name__}: adapters are on {len(self.targets)} matrices"
            warn_once(
                f"{found}; its experts ({', '.join(self.experts)}) stay: lora=none trains them"
            )
        if lora.quantization == "none":
            round_frozen_weights(model, lora.base_precision or "32-true")
        self.model = model.eval().requires_grad_(False)
        self.hidden_size = int(model.get_output_embeddings().weight.shape[1])
        self.heads = nn.ModuleDict()
        self.adapters: dict[str, LoraHparams] = {}
        self.layers: dict[str, Any] = {}
        self.active: str | None = None
        self.activation_checkpointing = activation_checkpointing

    def add_adapter(self, name: str, *, seed: int, lora: LoraHparams | None = None) -> None:
        """Put a new adapter on every target; it starts as 0, so nothing changes yet.

        Args:
            name: name of the adapter.
            seed: seeds the random half; the other half is 0.
            lora: rank and scale, where they differ from the base's own.
        """
        lora = lora or self.lora
        trained = [p for p in self.parameters() if p.requires_grad]
        config = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=["the modules of state_dict"],
            fan_in_fan_out=any(isinstance(m, Conv1D) for m in self.model.modules()),
        )
        # By the keys of a state dict, because of a mixture PEFT takes even the full path of a dense
        # gate_proj, up_proj or down_proj for its experts, and leaves the dense layer out.
        keys = {f"{path}.lora_A.weight": torch.empty(0) for path in self.targets}
        with seeded_init(seed), warnings.catch_warnings():
            for said in ("fan_in_fan_out", "having multiple", "the PEFT config and the provided"):
                warnings.filterwarnings("ignore", message=f".*{said}.*")
            inject_adapter_in_model(config, self.model, adapter_name=name, state_dict=keys)
        self.adapters[name] = lora
        self.layers = {n: m for n, m in self.model.named_modules() if isinstance(m, LoraLayer)}
        for layer in self.layers.values():
            # autocast casts what it multiplies; a cast to the adapter's fp32 before would be undone
            layer.cast_input_dtype_enabled = False
        self.model.requires_grad_(False)  # peft turns other adapters on and off
        self.model.train(self.model.training)  # peft's new layers are in train mode
        for parameter in (*trained, *self.adapter(name).float().parameters()):
            parameter.requires_grad_(True)
        if self.activation_checkpointing:  # once an adapter's dropout is known
            checkpoint_activations(self.model, self._contexts)
        self._switch(self.active)

    def adapter(self, name: str) -> nn.ModuleDict:
        """Return the modules of one adapter, by the module of the base that they change."""
        parts = nn.ModuleDict()
        for path, layer in self.layers.items():
            key = path.replace(".", "/")  # a key of a ModuleDict has no dot
            parts[f"{key}/lora_A"] = layer.lora_A[name]
            parts[f"{key}/lora_B"] = layer.lora_B[name]
            if layer.lora_dropout[name].__class__ is nn.Dropout:
                parts[f"{key}/lora_dropout"] = layer.lora_dropout[name]
        return parts

    @contextmanager
    def activated(self, name: str | None, *, training: bool = False) -> Iterator[None]:
        """Switch one adapter on, or all of them off, in train or in eval mode."""
        before = self.active, self.model.training
        self._switch(name)
        self._set_mode(training)
        try:
            yield
        finally:
            self._switch(before[0])
            self._set_mode(before[1])

    def forward(
        self, name: str | None, training: bool, function: Callable[..., T], *args: Any
    ) -> T:
        """Return `function(*args)` with adapter `name` on: a forward, for the sake of FSDP2.

        The base runs in the mode of the view that calls: it is no submodule that a view's `eval()`
        would reach. It stays in it, as the next forward is usually of the same mode.
        """
        self._set_mode(training)
        with self.activated(name, training=training):
            return function(*args)

    def drop_weights(self) -> None:
        """Free every weight; only what a state dict taken before holds is left.

        For the end of a run, before another copy of the base is read to merge an adapter into.
        """
        for parameter in self.parameters():
            parameter.data = parameter.data.new_empty(0)
            parameter.grad = None

    def _switch(self, name: str | None) -> None:
        # peft's own set_adapter() also sets requires_grad, of the adapters it switches off to
        # False; graphs of two adapters are alive at once here.
        self.active = name
        for layer in self.layers.values():
            layer._disable_adapters = name is None
            layer._active_adapter = [] if name is None else [name]

    def _set_mode(self, training: bool) -> None:
        if self.model.training != training:
            self.model.train(training)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        # A layer is repeated in the backward pass, when another adapter may be on.
        return nullcontext(), self.activated(self.active, training=self.model.training)


class _View(nn.Module):
    """A view of a base, which is no submodule of it."""

    base: AdaptedBase
    name: str | None

    def _view(self, base: AdaptedBase, name: str | None) -> None:
        nn.Module.__init__(self)
        object.__setattr__(self, "base", base)
        self.name = name
        if name is not None:
            self.adapter = base.adapter(name)

    @property
    def root(self) -> AdaptedBase:
        """The module that is placed and sharded as a whole: the base with all its adapters."""
        return self.base


class AdaptedPolicy(_View, PolicyModel):
    """A policy that is the base with one adapter on; without a name, the base itself.

    Args:
        base: shared with other views.
        name: name of an adapter that `base` has, or None.
    """

    def __init__(self, base: AdaptedBase, name: str | None) -> None:
        self._view(base, name)

    @property
    def model(self) -> PreTrainedModel:  # type: ignore[override]
        """The shared Hugging Face model; which adapter is on depends on who calls."""
        return self.base.model

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """Yield the base with this adapter on, in eval mode."""
        model = self.base.model
        precise = computing(model, self.device)
        with in_eval_mode(self), self.base.activated(self.name), precise:
            yield model

    def forward(self, *args: Any) -> TokenStatistics:
        """Return statistics of tokens; see `PolicyModel.forward`."""
        call: Any = self.base
        statistics: TokenStatistics = call(self.name, self.training, super().forward, *args)
        return statistics


class AdaptedScalarModel(_View, ScalarHeadModel):
    """A value or reward model that is the base's decoder with one adapter on, and a head.

    Args:
        base: shared with other views.
        name: name of an adapter and of a head that `base` has.
    """

    def __init__(self, base: AdaptedBase, name: str) -> None:
        self._view(base, name)
        self.head = base.heads[name]  # type: ignore[assignment]

    @property
    def trunk(self) -> PreTrainedModel:  # type: ignore[override]
        """The shared decoder."""
        return self.base.model.base_model  # type: ignore[no-any-return]

    def forward(self, *args: Any) -> Tensor:
        """Return scalars at positions; see `ScalarHeadModel.forward`."""
        call: Any = self.base
        scalars: Tensor = call(self.name, self.training, super().forward, *args)
        return scalars


def add_policy(base: AdaptedBase, name: str, *, seed: int) -> AdaptedPolicy:
    """Return a new policy on `base`, which starts as the base itself."""
    base.add_adapter(name, seed=seed)
    return AdaptedPolicy(base, name)


def add_scalar_model(
    base: AdaptedBase, name: str, *, init_std: float, seed: int
) -> AdaptedScalarModel:
    """Return a new value or reward model on `base`.

    Args:
        base: gets an adapter and a head.
        name: name of both.
        init_std: standard deviation of the head's weights; 0 starts values at 0.
        seed: seeds adapter and head.
    """
    base.add_adapter(name, seed=seed)
    with seeded_init(seed):
        head = scalar_head(base.hidden_size, init_std=init_std)
    base.heads[name] = head.to(base.model.device)
    return AdaptedScalarModel(base, name)


def experts_of(model: nn.Module) -> list[str]:
    """Return the names of the parameters that hold the matrices of all experts of a layer."""
    modules = (module for module in model.modules() if not isinstance(module, nn.Conv1d))
    own = (named for module in modules for named in module.named_parameters(recurse=False))
    return sorted({name for name, parameter in own if parameter.ndim == 3})


def target_modules(model: nn.Module, names: str) -> list[str]:
    """Return the full paths of the modules that get an adapter.

    Args:
        model: a causal language model.
        names: "all-linear" (all but the output head), or ends of paths separated by commas:
            `q_proj`, `shared_experts.up_proj`.

    Raises:
        ValueError: if a name is none of the model's matrices.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    paths = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    if names.strip() == ALL_LINEAR:
        return paths
    ends = tuple(f".{name.strip()}" for name in names.split(",") if name.strip())
    for end in ends:
        if not any(f".{path}".endswith(end) for path in paths):
            known = sorted({path.rpartition(".")[2] for path in paths})
            told = f"lora.target_modules names {end[1:]!r}, not in {type(model).__name__}"
            raise ValueError(f"{told}: use {ALL_LINEAR}, or some of {', '.join(known)}")
    return [path for path in paths if f".{path}".endswith(ends)]
