"""The end of a run in Weights & Biases: figures, gates, samples, and what the model came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlhf_lightning.assembly import Parts, source_fingerprint
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.wandb_content import log_samples, wandb_loggers
from rlhf_lightning.callbacks.wandb_lineage import Origin, log_lineage, records_fingerprint
from rlhf_lightning.evaluation.stages import Findings
from rlhf_lightning.model_folder import publishes
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import ManifestError, fingerprint, read_manifest
from rlhf_lightning.runs.summary import Summary


def finish_tracking(
    cfg: DictConfig, folder: RunFolder, parts: Parts, findings: Findings, summary: Summary
) -> None:
    """Show the end of a run in W&B, if it is shown there, and close it."""
    for logger in wandb_loggers(parts.trainer):
        if findings.samples:
            iteration = current_iteration(parts.trainer)
            log_samples(logger, iteration, "held_out", findings.samples)
        logger.guarded(
            lambda logger=logger: log_lineage(
                logger, used_by(cfg, parts), made_by(cfg, folder, summary)
            )
        )
        logger.finish(summary.metrics, summary.gates)


def used_by(cfg: DictConfig, parts: Parts) -> Iterator[Origin]:
    """Yield the records that a stage was trained on and the models that it started from."""
    data = parts.data
    records = data.source.records(data.kind, "train")
    yield Origin(
        role="data",
        name=f"{cfg.world.name}-{data.kind}",
        kind="dataset",
        fingerprint=records_fingerprint(records),
        metadata={"records": len(records), "kind": data.kind},
    )
    for role in ("base", "sft", "reward", "ppo"):
        source = cfg.artifacts[role]
        if source is not None and _is_used(cfg, role):
            revision = cfg.model.get("revision")
            yield Origin(
                role, artifact_name(source), "model", source_fingerprint(source, revision), {}
            )


def made_by(cfg: DictConfig, folder: RunFolder, summary: Summary) -> Iterator[Origin]:
    """Yield the model that a stage has made."""
    if not (folder.export / "config.json").is_file():
        return  # an adapter alone, or several models
    target = cfg.artifacts.publish
    metadata: dict[str, Any] = {
        "stage": summary.stage,
        "passed": summary.passed,
        "metrics": {k: v for k, v in summary.metrics.items() if v is not None},
    }
    name = f"{cfg.world.name}-{cfg.name}" if target is None else artifact_name(target)
    yield Origin(cfg.name, name, "model", _fingerprint(cfg, folder), metadata)


def _fingerprint(cfg: DictConfig, folder: RunFolder) -> str:
    """Return that of what later stages load: an export may be rounded."""
    if publishes(cfg):
        with suppress(ManifestError):
            manifest = read_manifest(cfg.artifacts.publish, verify=False)
            if manifest.run == str(folder.path):
                return manifest.fingerprint
    return fingerprint(folder.export)


def artifact_name(source: str) -> str:
    """Return what a model is called in W&B: the last two parts of its folder, or of a hub name."""
    return "-".join(Path(source).parts[-2:])


def _is_used(cfg: DictConfig, role: str) -> bool:
    return (
        role in {"sft": ("base",), "reward": ("sft",), "ppo": ("sft", "reward", "ppo")}[cfg.stage]
    )
