"""Export a run's model as a Hugging Face folder: `python -m rlhf_lightning.export RUN`."""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_lightning.app.command_line import run_command
from rlhf_lightning.app.config.commands import ExportSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.saved import best_of_early_stopping
from rlhf_lightning.models.quiet import quieten
from rlhf_lightning.runs.folder import RunFolder, near_run
from rlhf_lightning.runs.hub import push_folder
from rlhf_lightning.runs.lock import is_claimed
from rlhf_lightning.runs.manifest import is_adapter, of_adapter
from rlhf_lightning.runs.resume import checkpoint_problem, newest_complete_checkpoint


def run(settings: ExportSettings) -> list[str]:
    """Export, upload if that was asked for, and return where the model is now.

    Raises:
        ConfigError: with what is missing and what to do.
        HubError: if the hub does not take the folder.
    """
    quieten()
    places = []
    if any((settings.run / name).is_file() for name in ("config.json", "adapter_config.json")):
        folder = settings.run
        if settings.push_to_hub is None:
            told = f"{folder} is an exported model already: give a run folder, or push_to_hub=NAME"
            raise ConfigError(of_adapter(folder) if is_adapter(folder) else told)
    else:
        run_folder, checkpoint = find_checkpoint(settings.run)
        folder = find_target(settings, run_folder)
        # brings torch: a mistake on the command line is reported before
        from rlhf_lightning.app.model_export import export_checkpoint

        told = export_checkpoint(settings, run_folder, checkpoint, folder)
        sys.stderr.write(told)  # for people: what a program reads is the folder alone
        places.append(str(folder))
    if settings.push_to_hub is not None:
        places.append(push_folder(folder, settings.push_to_hub, private=not settings.public))
    return places


def find_checkpoint(path: Path) -> tuple[RunFolder, Path]:
    """Return the run folder and the checkpoint that `path` means.

    Args:
        path: a run folder, for the best checkpoint of a finished run with early stopping and else
            for the newest complete one, or a checkpoint.

    Raises:
        ConfigError: if it is neither, or if there is no complete checkpoint.
    """
    if (path / ".hydra" / "config.yaml").is_file():
        folder = RunFolder(path)
        checkpoint = best_of_early_stopping(folder) or newest_complete_checkpoint(folder)
        if checkpoint is None:
            raise ConfigError(f"{folder.checkpoints} holds no complete checkpoint")
        return folder, checkpoint
    folder = RunFolder(path.absolute().parent.parent)
    if path.suffix != ".ckpt" or not path.exists() or not folder.config.is_file():
        told = f"{path} {'is no run folder' if path.exists() else 'does not exist'}: give a run "
        raise ConfigError(f"{told}below outputs/, or a checkpoint in one{near_run(path)}")
    if problem := checkpoint_problem(path):
        raise ConfigError(problem)
    return folder, path


def find_target(settings: ExportSettings, folder: RunFolder) -> Path:
    """Return the folder to write.

    Raises:
        ConfigError: if that would overwrite something, or meet a run that is writing.
    """
    if settings.to is None:
        if is_claimed(folder.path):
            raise ConfigError(f"{folder.path} is being written by a run: give to=FOLDER")
        return folder.path / "adapter" if settings.adapter_only else folder.export
    if settings.to.exists() and (not settings.to.is_dir() or any(settings.to.iterdir())):
        raise ConfigError(f"{settings.to} is there already: give another folder, to=FOLDER")
    return settings.to


def main() -> None:
    """Run the command line."""
    run_command("export", run)
