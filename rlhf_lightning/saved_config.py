"""What Hydra has written of a run's configuration, without its secrets."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.composition import plain
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.secrets import learn_secrets, redact_files, redact_logs


def keep_secrets(cfg: DictConfig, folder: RunFolder | None) -> None:
    """Remove the secrets of `cfg` and of the environment from saved files and from every log.

    Args:
        cfg: of the run.
        folder: of the run, in whose `.hydra/` the configuration is; None rewrites no file.
    """
    learn_secrets(plain(cfg), OmegaConf.to_container(cfg, resolve=False))
    redact_logs()
    if folder is not None:
        saved = folder.config.parent.glob("*.yaml")
        redact_files(*saved, folder.path.parent / "multirun.yaml")
