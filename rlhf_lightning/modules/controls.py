"""What changes during a run, in one place that is checkpointed and public."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from rlhf_lightning.hparams import PPOHparams, SamplingHparams


@dataclass
class Controls:
    """Knobs that the KL controller and callbacks turn, effective at the next rollout.

    They must be turned identically on every rank.

    Args:
        kl_coef: weight of the KL penalty in the reward.
        temperature: of sampling and of every log-probability.
        learning_rate_factor: multiplies every learning rate of the schedule.
        domain_weights: multiplies the score of a domain's rows before it is shaped; 1 where absent.
    """

    kl_coef: float
    temperature: float
    learning_rate_factor: float = 1.0
    domain_weights: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_hparams(cls, ppo: PPOHparams, sampling: SamplingHparams) -> Self:
        """Return the controls that a run starts with."""
        return cls(kl_coef=ppo.kl_coef, temperature=sampling.temperature)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint.

        Raises:
            KeyError: if a value is missing.
        """
        for item in fields(self):
            setattr(self, item.name, state[item.name])
