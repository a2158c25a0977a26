"""Settings that change during a run: one object, checkpointed and public."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Self

from pydantic import Field

from rlhf_lightning.arguments import LOWEST_TEMPERATURE, AtLeast0, annotations_of, fitting
from rlhf_lightning.functional.kl import adapted_kl_coef
from rlhf_lightning.hparams import OnPolicyHparams, SamplingHparams
from rlhf_lightning.misfit import did_you_mean
from rlhf_lightning.modules.checkpoint_state import log_changed

ASKED = "asked"  # in a checkpoint: what the run that wrote it began with


@dataclass
class Controls:
    """Values that the KL controller and callbacks change, effective at the next rollout.

    They must be changed identically on every rank. A value that cannot be meant is refused when it
    is set, as is a name that is none of these.

    Args:
        kl_coef: weight of the KL penalty, in the reward or in the loss.
        temperature: temperature of sampling and of every log-probability.
        learning_rate_factor: multiplies every learning rate of the schedule.
        diversity_bonus: reward units; times the share of a response's bigrams that no other
            response of the iteration has, it is added to the score.
        domain_weights: multiplies the score of a domain's rows before it is shaped, and its clip
            where it is above 1; 1 where absent.
    """

    kl_coef: AtLeast0
    temperature: Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=10)]
    learning_rate_factor: AtLeast0 = 1.0
    diversity_bonus: float = 0.0
    domain_weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Ask for nothing: `from_hparams` does."""
        self._asked: dict[str, float] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value that fits."""
        hints = annotations_of(Controls)
        if name not in (*hints, "_asked"):
            raise AttributeError(f"controls have no {name!r}{did_you_mean(name, hints)}")
        if name in hints:
            value = fitting(f"controls.{name}", value, hints[name])
        super().__setattr__(name, value)

    @classmethod
    def from_hparams(cls, hparams: OnPolicyHparams, sampling: SamplingHparams, key: str) -> Self:
        """Return the controls that a run starts with.

        Args:
            hparams: coefficients of the algorithm.
            sampling: settings of the rollouts.
            key: place of the coefficients in a configuration, such as `module.ppo`.
        """
        controls = cls(kl_coef=hparams.kl_coef, temperature=sampling.temperature)
        controls._asked = {
            f"{key}.kl_coef": hparams.kl_coef,
            "module.sampling.temperature": sampling.temperature,
        }
        return controls

    def adapt_kl_coef(
        self, observed_kl: float | None, hparams: OnPolicyHparams, *, num_episodes: int
    ) -> None:
        """Move `kl_coef` towards `kl_target`.

        Args:
            observed_kl: nats per response, mean over all ranks; None where it was not finite, which
                leaves the coefficient as it is.
            hparams: target and horizon of the controller.
            num_episodes: responses of all ranks.
        """
        if observed_kl is not None:
            self.kl_coef = adapted_kl_coef(
                self.kl_coef,
                observed_kl,
                target=hparams.kl_target,
                horizon=hparams.kl_horizon,
                num_episodes=num_episodes,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return asdict(self) | {ASKED: dict(self._asked)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint, except those that the run sets differently.

        A run that sets another `kl_coef` than the checkpoint's run did gets it, and logs that; one
        that sets the same continues with the value that the KL controller and the doctor had
        reached.

        Raises:
            KeyError: if a value is missing.
        """
        for item in fields(self):
            setattr(self, item.name, state[item.name])
        before = state.get(ASKED, {})
        for key, value in self._asked.items():
            name = key.rpartition(".")[2]
            if before.get(key, value) != value:
                log_changed(key, value, getattr(self, name))
                setattr(self, name, value)
