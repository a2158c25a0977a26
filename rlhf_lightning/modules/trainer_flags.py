"""Refuse flags of a Trainer with which a stage would train something else, in silence."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.model_helpers import is_overridden

from rlhf_lightning.modules.data_checks import check_data

TRAINED_IN = ("32-true", "bf16-mixed")


def check_trainer(trainer: L.Trainer, *, num_steps: int = 1) -> None:
    """Check what a stage asks of its Trainer, and of the Trainer's data.

    `trainer_arguments` gives all that is asked of the Trainer.

    Args:
        trainer: that was given the module.
        num_steps: optimizer steps of an iteration, at most.

    Raises:
        ValueError: naming the flag, what it is, why that is wrong and what to write; also from
            `check_data`.
        TypeError: if the data are of another kind.
    """
    problem = _problem(trainer, num_steps)
    if problem is not None:
        raise ValueError(f"{problem}. trainer_arguments(folder, ...) sets what a stage needs")
    check_data(trainer.lightning_module, getattr(trainer, "datamodule", None))


def check_steps(trainer: Any) -> None:
    """Check the flags that Lightning refuses under manual optimization, before it does.

    Raises:
        ValueError: naming the flag, and the setting to use in its place.
    """
    given = {
        "gradient_clip_val": (trainer.gradient_clip_val, None),
        "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1),
        "overfit_batches": (trainer.overfit_batches, 0.0),
    }
    for name, (value, default) in given.items():
        if value is not None and value != default:
            raise ValueError(f"Trainer({name}={value}): {_INSTEAD[name]}")


_INSTEAD = {
    "gradient_clip_val": "gradients are clipped by max_grad_norm of the module's hyper-parameters",
    "accumulate_grad_batches": "an iteration is one batch of the DataModule's batch_size, which "
    "micro_batch_size of the module's hyper-parameters cuts into what fits the memory",
    "overfit_batches": "a batch of the same rows comes from a DataModule with no more rows than "
    "its batch_size and max_iterations=..., that is limit_train_batches",
}


def _problem(trainer: Any, num_steps: int) -> str | None:
    if trainer.max_epochs != 1:
        given = "its default" if trainer.max_epochs in (None, 1000) else "given"
        return (
            f"Trainer(max_epochs={trainer.max_epochs}), {given}: a stage is one epoch, as "
            "long as the DataModule or max_iterations says, and a second one would repeat the "
            "sampling noise of the first: use max_epochs=1"
        )
    if trainer.max_steps != -1 and num_steps > 1 and not trainer.fast_dev_run:
        return (
            f"Trainer(max_steps={trainer.max_steps}) counts optimizer steps, up to {num_steps} an "
            "iteration here, and the schedule counts iterations: use "
            "trainer_arguments(max_iterations=...), that is limit_train_batches, and max_steps=-1"
        )
    if trainer.precision not in TRAINED_IN:
        return (
            f"Trainer(precision={trainer.precision!r}): weights in 16 bits lose the small updates "
            f"of RLHF: use one of {', '.join(TRAINED_IN)}"
        )
    name = type(trainer.strategy).__name__
    if name in ("FSDPStrategy", "DeepSpeedStrategy"):
        return (
            f"Trainer(strategy={name}) does not work under manual optimization: use "
            "strategy=FSDP2Strategy()"
        )
    connector = trainer._accelerator_connector
    if trainer.world_size > 1 and connector.use_distributed_sampler:
        return (
            "Trainer(use_distributed_sampler=True), its default: Lightning would deal the rows "
            "anew, which our DataModules deal to ranks: use use_distributed_sampler=False"
        )
    module = trainer.lightning_module
    stopping = [c for c in trainer.callbacks if isinstance(c, EarlyStopping)]
    if stopping and not is_overridden("validation_step", module, L.LightningModule):
        return (
            f"{type(stopping[0]).__name__}(monitor={stopping[0].monitor!r}) stops SFT, reward and "
            f"DPO training by val/loss, which {type(module).__name__} does not have, and would "
            "never stop it: leave it out"
        )
    return None
