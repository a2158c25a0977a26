"""Early stopping, and the weights with which a run ends that it may stop."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from rlhf_lightning.arguments import CountOrZero, Name, checked
from rlhf_lightning.callbacks.checkpointing import IterationCheckpoint
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.modules.checkpoint_state import log_changed

logger = logging.getLogger(__name__)


class PatientStopping(EarlyStopping):
    """Lightning's early stopping, whose patience at a resume is the one that is asked for.

    It says why it stopped: Lightning's is silent unless it also tells every improvement.

    Args:
        monitor: the metric that has to improve.
        patience: validations without an improvement after which it stops.
        mode: whether the metric should be small or large.
        further: other arguments of Lightning's.
    """

    @checked
    def __init__(
        self,
        monitor: Name,
        *,
        patience: CountOrZero = 3,
        mode: Literal["min", "max"] = "min",
        **further: Any,
    ) -> None:
        super().__init__(monitor, patience=patience, mode=mode, **further)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the metric, and name what stops the run when it first does."""
        before = self.stopping_reason_message
        super().on_validation_end(trainer, pl_module)
        reason = self.stopping_reason_message
        if reason is not None and reason != before and trainer.is_global_zero:
            said = reason.removesuffix(" Signaling Trainer to stop.")
            logger.warning("early stopping at iteration %d: %s", current_iteration(trainer), said)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the best value and how long ago it was; with more patience it has not stopped."""
        if state_dict["patience"] != self.patience:
            log_changed("callbacks.early_stopping.patience", self.patience, state_dict["patience"])
        super().load_state_dict(state_dict | {"patience": self.patience})
        exhausted = self.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
        if exhausted and self.wait_count < self.patience:
            self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
            self.stopping_reason_message = None


class BestWeights(Callback):
    """Loads the weights of the best checkpoint into the module when training has ended.

    Later measurement, export and publication use the best weights by the metric of the checkpoints,
    not those after early stopping's patience. `last.ckpt` stays the end of training.

    Attributes:
        iteration: the iteration whose weights were loaded, None if the last ones stayed.
    """

    iteration: int | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier fit.

        Raises:
            ValueError: if another callback would put its weights over the best.
        """
        self.iteration = None
        for callback in cast(Any, trainer).callbacks:
            if isinstance(callback, WeightAveraging):
                name = type(callback).__name__
                raise ValueError(f"early_stopping ends with the best weights, not {name}'s average")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load them, on every rank, if the last weights are not the best."""
        callbacks: list[Any] = cast(Any, trainer).callbacks
        keeper = next((c for c in callbacks if isinstance(c, IterationCheckpoint)), None)
        if keeper is None or not keeper.best_model_path:
            return
        last = current_iteration(trainer)
        if keeper.best_iteration == last:
            return
        strategy: Any = trainer.strategy
        strategy.load_model_state_dict(strategy.load_checkpoint(Path(keeper.best_model_path)))
        strategy.barrier("BestWeights.on_train_end")
        self.iteration = keeper.best_iteration
        if trainer.is_global_zero:
            best = f"{self.iteration} ({keeper.monitor} {keeper.best_model_score:.4g})"
            logger.warning(f"early stopping: the weights are those of iteration {best}, not {last}")
