"""The request for an export: its run, checkpoint and target.

Must not import torch: a mistake is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from rlhf_lightning.app.stages.spec import find_stage
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import is_claimed
from rlhf_lightning.runs.resume import checkpoint_problem, newest_complete_checkpoint
from rlhf_lightning.runs.taken import summary_or_none


@dataclass(frozen=True)
class Request:
    """The run to export, and the target.

    Args:
        run: run folder, checkpoint or exported folder.
        to: the new folder; None for `export/` (`adapter/`) in the run folder.
        dtype: of the weights: auto, fp32 or bf16; None as the run's configuration says.
        adapter_only: the adapter of a LoRA run without its base.
        push_to_hub: repository to upload to; None uploads nothing.
        public: whether a new repository is public.
    """

    run: Path
    to: Path | None = None
    adapter_only: bool = False
    dtype: str | None = None
    push_to_hub: str | None = None
    public: bool = False


class ExportError(Exception):
    """There is nothing to export, or nowhere to put it."""


def find_checkpoint(path: Path) -> tuple[RunFolder, Path]:
    """Return the run folder and the checkpoint that `path` means.

    Args:
        path: a run folder, for the best checkpoint of a finished run with early stopping and else
            for the newest complete one, or a checkpoint.

    Raises:
        ExportError: if it is neither, or if there is no complete checkpoint.
    """
    if (path / ".hydra" / "config.yaml").is_file():
        folder = RunFolder(path)
        checkpoint = best_of_early_stopping(folder) or newest_complete_checkpoint(folder)
        if checkpoint is None:
            raise ExportError(f"{folder.checkpoints} holds no complete checkpoint")
        return folder, checkpoint
    if not path.exists():
        raise ExportError(f"{path} does not exist: give a run folder, or a checkpoint in one")
    folder = RunFolder(path.absolute().parent.parent)
    if path.suffix != ".ckpt" or not folder.config.is_file():
        raise ExportError(
            f"{path} is no run folder and no checkpoint in one: there is no .hydra/config.yaml; "
            "runs are in outputs/"
        )
    if problem := checkpoint_problem(path):
        raise ExportError(f"{path}: {problem}")
    return folder, path


def best_of_early_stopping(folder: RunFolder) -> Path | None:
    """Return the checkpoint with which a finished run with early stopping has ended, else None."""
    summary = summary_or_none(folder)
    if summary is None or summary.status != "completed":
        return None
    try:
        cfg = yaml.safe_load(folder.config.read_text("utf-8"))
        validates = find_stage(cfg["stage"]).validates
        stops = validates and cfg["callbacks"]["early_stopping"] is not None
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
    best = folder.best_checkpoint.resolve()
    return best if stops and checkpoint_problem(best) is None else None


def find_target(request: Request, folder: RunFolder) -> Path:
    """Return the folder to write.

    Raises:
        ExportError: if that would overwrite something, or meet a run that is writing.
    """
    if request.to is None:
        if is_claimed(folder.path):
            raise ExportError(f"{folder.path} is being written by a run: give a folder with --to")
        return folder.path / "adapter" if request.adapter_only else folder.export
    if request.to.exists() and (not request.to.is_dir() or any(request.to.iterdir())):
        raise ExportError(f"{request.to} is there already: give another folder with --to")
    return request.to
