"""An estimator that gives every token the same advantage: a control for distillation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ConstantAdvantage:
    """Estimates the same advantage for all tokens, whatever their reward.

    Args:
        value: the advantage.
    """

    value: float

    @property
    def scale_free(self) -> bool:
        """True: rewards change nothing."""
        return True

    def __call__(
        self, rewards: Tensor, values: Tensor | None, mask: Tensor, group_ids: Tensor
    ) -> tuple[Tensor, None]:
        """Return advantages `[B, R]`, 0 off the mask, and no targets."""
        return mask * self.value, None
