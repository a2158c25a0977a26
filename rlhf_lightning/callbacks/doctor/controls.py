"""Between the doctor's decisions and `module.controls`, the only place that it may change."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

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


def apply(module: Any, treatment: Treatment) -> None:
    """Make one change in the controls of a `PPOModule` that is being trained.

    Raises:
        AttributeError: if it names no control.
    """
    controls: Controls = module.controls
    name = treatment.control
    if name.startswith(_WEIGHT):
        weights = controls.domain_weights | {name.removeprefix(_WEIGHT): treatment.after}
        controls.domain_weights = weights
    elif hasattr(controls, name):
        setattr(controls, name, treatment.after)
        if name == "learning_rate_factor":
            _renew_learning_rates(module.lr_schedulers())
    else:
        raise AttributeError(f"{name!r} is no control of {type(controls).__name__}")


def _renew_learning_rates(scheduler: LambdaLR) -> None:
    """Set the rates of the next iteration, for which the schedule has stepped already."""
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
