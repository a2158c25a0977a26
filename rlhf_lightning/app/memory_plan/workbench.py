"""Skeletons of the models of a run, made once, and what is measured on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lightning.app.memory_plan import fake_models as skeletons
from rlhf_lightning.app.memory_plan.fake_models import Style, made_fake
from rlhf_lightning.app.memory_plan.run import Run
from rlhf_lightning.app.memory_plan.shapes import Shape
from rlhf_lightning.app.memory_plan.traces import FEW, MORE, Peaks, extrapolated, largest
from rlhf_lightning.app.memory_plan.weights import ELEMENTS, weight_bytes

POLICY, VALUE, REFERENCE, REWARD = "policy", "value", "reference", "reward"
OWN, BASE = "own", "base"
_MADE: dict[tuple[Any, ...], Any] = {}


class Workbench:
    """The models of one run.

    Skeletons are kept for the whole process: a suggestion that changes the batch alone measures
    the same ones again.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def shape_of(self, kind: str) -> Shape:
        """Return the shape of a model; a reward model may have one of its own."""
        own = self.run.scoring.shape if kind == REWARD else None
        return own or self.run.shape

    def peak(self, kind: str, measure: Callable[[Any], Peaks]) -> dict[str, int]:
        """Return the peak of `measure(model)` by category, at the model's full depth."""
        return largest(self.peaks(kind, measure))

    def peaks(
        self, kind: str, measure: Callable[[Any], Peaks], *, as_held: bool = False
    ) -> dict[str, dict[str, int]]:
        """Return `measure(model)` segment by segment, at the model's full depth.

        Args:
            kind: which model.
            measure: of a skeleton.
            as_held: with weights as they are held, not as FSDP2 gathers them.
        """
        depth = self.shape_of(kind).num_layers
        return extrapolated(lambda layers: measure(self.model(kind, layers, as_held)), depth)

    @property
    def parts(self) -> tuple[str, ...]:
        """What the weights of a trained model consist of."""
        return (OWN,) if self.run.style.lora is None else (OWN, BASE)

    def weights(self, kind: str, *, part: str = OWN) -> Counter[str]:
        """Return `weight_bytes` of a model at its full depth.

        Args:
            kind: which model.
            part: `OWN`, its own parameters; `BASE`, those of the base that adapters share.
        """
        key = ("weights", part, *self._key(kind))
        if key not in _MADE:
            depth = self.shape_of(kind).num_layers
            found = extrapolated(lambda n: {"": self._count(kind, n, part)}, depth)
            _MADE[key] = Counter(found[""])
        return _MADE[key]  # type: ignore[no-any-return]

    def layer_elements(self, kind: str) -> int:
        """Return the number of weights of one decoder layer, adapters included."""
        few, more = (
            sum(self._count(kind, n, part)[ELEMENTS] for part in self.parts) for n in (FEW, MORE)
        )
        return more - few

    def model(self, kind: str, num_layers: int, as_held: bool = False) -> Any:
        """Return a skeleton, of fake tensors."""
        dtype = None if as_held else self.run.style.compute_dtype
        key = (num_layers, dtype, *self._key(kind))
        if key not in _MADE:
            model = self._build(kind, num_layers)
            if self.run.device != "cpu":
                skeletons.as_on_a_gpu(model.root)
            made_fake(model.root, dtype)
            _MADE[key] = model
        return _MADE[key]

    def _key(self, kind: str) -> tuple[Any, ...]:
        fields = repr(sorted(self.shape_of(kind).fields.items()))
        dtype = self.run.scoring.dtype if kind == REWARD else None
        return kind, fields, self.run.style, dtype, self.run.device

    def _build(self, kind: str, num_layers: int) -> Any:
        style, shape = self.run.style, self.shape_of(kind)
        if kind == POLICY:
            return skeletons.policy(shape, num_layers, style)
        if kind == VALUE:
            return skeletons.scalar_model(shape, num_layers, style)
        if kind == REFERENCE:
            return skeletons.reference(shape, num_layers, style)
        return skeletons.reward_model(shape, num_layers, style, self.run.scoring.dtype)

    def _count(self, kind: str, num_layers: int, part: str) -> Mapping[str, int]:
        style = self.run.style
        # As they are held: under FSDP2 skeletons are in the dtype of the gathered weights.
        model = self._build(kind, num_layers)
        nf4 = style.lora is not None and style.lora.quantization == "nf4"
        return weight_bytes(
            model if part == OWN else model.root.model,
            compute_dtype=compute_dtype(style),
            device=self.run.device,
            nf4=nf4,
            frozen_only=part == BASE,
        )


def compute_dtype(style: Style) -> torch.dtype:
    """Return the dtype of matrix products."""
    return torch.bfloat16 if style.autocast else style.compute_dtype or torch.float32
