"""TensorBoard with `iteration` as the step of every curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from rlhf_lightning.runs.folder import RunFolder


class IterationTensorBoardLogger(TensorBoardLogger):
    """Lightning's logger with iterations as steps; a resumed run continues in the same folder.

    TensorBoard shows an iteration once: the first row hides what a killed or rolled-back run logged
    there from that iteration on.
    """

    _begun = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one row.

        Args:
            metrics: number by name.
            step: batches done before this one, as Lightning counts them; the row is that of
                iteration `step + 1`.
        """
        # NaN says that something was not measured.
        row = {k: float(v) for k, v in metrics.items() if k not in ("epoch", "step") and v == v}
        iteration = None if step is None else step + 1
        if iteration is not None and not self._begun:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            # As `purge_step` of the writer, which Lightning opens before it is known.
            start = Event(session_log=SessionLog(status=SessionLog.START))
            self.experiment._get_file_writer().add_event(start, iteration)
            self._begun = True
        super().log_metrics(row, iteration)


def tensorboard_logger(folder: RunFolder) -> IterationTensorBoardLogger:
    """Return the logger of a run, which writes to `tensorboard/` of the run folder.

    Raises:
        ModuleNotFoundError: if TensorBoard is not installed.
    """
    settings: dict[str, Any] = {"name": "", "version": "", "default_hp_metric": False}
    try:
        return IterationTensorBoardLogger(str(folder.create().path / "tensorboard"), **settings)
    except ModuleNotFoundError as error:
        fix = "pip install -e '.[tensorboard]' in the checkout, or use logger=csv"
        raise ModuleNotFoundError(f"logger=tensorboard needs tensorboard: {fix}") from error
