"""TensorBoard with `iteration` as the step of every curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from rlhf_lightning.runs.folder import RunFolder

_NOT_METRICS = ("epoch", "step")


class IterationTensorBoardLogger(TensorBoardLogger):
    """Lightning's logger with iterations as steps; a resumed run goes on in the same folder.

    What a killed run logged beyond its checkpoint is logged again with equal values.
    """

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one row.

        Args:
            metrics: names to numbers.
            step: batches done before this one, as Lightning counts them; the row is that of
                iteration `step + 1`.
        """
        # NaN says that something was not measured.
        row = {k: float(v) for k, v in metrics.items() if k not in _NOT_METRICS and v == v}
        super().log_metrics(row, None if step is None else step + 1)


def tensorboard_logger(folder: RunFolder) -> IterationTensorBoardLogger:
    """Return the logger of a run; what it writes stands in `tensorboard/` of the run folder.

    Raises:
        ModuleNotFoundError: if TensorBoard is not installed.
    """
    settings: dict[str, Any] = {"name": "", "version": "", "default_hp_metric": False}
    try:
        return IterationTensorBoardLogger(str(folder.create().path / "tensorboard"), **settings)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "logger=tensorboard needs the package tensorboard: pip install -e '.[tensorboard]' in "
            "the checkout, or use logger=csv"
        ) from error
