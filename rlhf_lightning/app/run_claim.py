"""A run takes its folder before anything is written there, by Hydra or by us.

Light on purpose: Hydra makes `ClaimFolder` before it makes the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.command_line import fail
from rlhf_lightning.app.pipeline.state import has_more_to_do, pipeline_hash
from rlhf_lightning.app.stages.spec import run_kind
from rlhf_lightning.distributed.launch import agree_on
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError, take_run
from rlhf_lightning.runs.resume import config_hash
from rlhf_lightning.runs.taken import check_free, check_free_sweep, summary_or_none


class ClaimFolder(Callback):
    """Refuse a folder that is not free, in one line, before Hydra writes `.hydra` or a log.

    The first rank looks; the others wait for it.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Take the folder of a single run."""
        HydraConfig.instance().set_config(config)  # the folder's name may refer to it
        folder = RunFolder(Path(str(OmegaConf.select(config, "hydra.run.dir"))))
        _or_fail("hydra.run.dir", folder.path, lambda: check_folder(config, folder))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Take the folder of a sweep, for as long as it lasts."""
        HydraConfig.instance().set_config(config)
        folder = Path(str(OmegaConf.select(config, "hydra.sweep.dir")))
        _or_fail("hydra.sweep.dir", folder, lambda: check_free_sweep(folder))


def check_folder(cfg: DictConfig, folder: RunFolder) -> None:
    """Check that the run of a configuration may write into a folder.

    Raises:
        FolderTakenError: if another run is complete there, or could be continued.
    """
    check_free(folder, run_kind(cfg.stage), continues=continues(cfg, folder))


def continues(cfg: DictConfig, folder: RunFolder) -> bool:
    """Return whether a run goes on with what stands in its folder.

    That is so with a checkpoint of the folder itself, and with `resume=auto` where the folder's
    run is an unfinished one of this configuration.
    """
    checkpoint = cfg.get("ckpt_path")
    if checkpoint is not None:
        return folder.path.resolve() in Path(str(checkpoint)).resolve().parents
    summary = summary_or_none(folder)
    if cfg.get("resume") != "auto" or summary is None:
        return False
    if "rounds" in cfg:
        return summary.config_hash == pipeline_hash(cfg) and has_more_to_do(folder, cfg.rounds)
    written = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(written, Mapping)
    return summary.status != "completed" and summary.config_hash == config_hash(written)  # type: ignore[arg-type]


def _or_fail(key: str, folder: Path, check: Callable[[], None]) -> None:
    def taken() -> str:
        take_run(folder, check)
        return str(folder)

    try:
        agree_on("free folder", taken)
    except FolderTakenError as error:
        fail(str(error))
    except OSError as error:
        reason = error.strerror or str(error)
        fail(
            f"{key}={folder} cannot be written ({reason}: {error.filename}): give a folder that "
            "can, with it or with paths.outputs="
        )
    except RuntimeError as error:  # of the first rank, told by it
        fail(str(error))
