"""Between the doctor's decisions and `module.controls`, the only place that it may change."""

from __future__ import annotations

from typing import Any

from rlhf_lightning.evaluation.doctor.treatments import Knobs, Treatment
from rlhf_lightning.modules.controls import Controls

_WEIGHT = "domain_weights."


def knobs_of(module: Any) -> Knobs:
    """Return the controls of a `PPOModule` as they stand."""
    controls: Controls = module.controls
    return Knobs(
        kl_coef=controls.kl_coef,
        temperature=controls.temperature,
        learning_rate_factor=controls.learning_rate_factor,
        diversity_bonus=controls.diversity_bonus,
        domain_weights=dict(controls.domain_weights),
        adapts_kl_coef=module.ppo.kl_target is not None,
    )


def apply(controls: Controls, treatment: Treatment) -> None:
    """Make one change.

    Raises:
        AttributeError: if it names no control.
    """
    name = treatment.control
    if name.startswith(_WEIGHT):
        weights = controls.domain_weights | {name.removeprefix(_WEIGHT): treatment.after}
        controls.domain_weights = weights
    elif hasattr(controls, name):
        setattr(controls, name, treatment.after)
    else:
        raise AttributeError(f"{name!r} is no control of {type(controls).__name__}")
