"""The end of a run in Weights & Biases: its samples, and the lineage of data and models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import is_loaded
from rlhf_lightning.app.evaluation import TrainingComponents
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.wandb_logger import (
    Origin,
    log_lineage,
    log_samples,
    records_fingerprint,
    wandb_loggers,
)
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import (
    ManifestError,
    fingerprint,
    read_manifest,
    source_fingerprint,
)
from rlhf_lightning.runs.summary import Summary


def finish_tracking(parts: TrainingComponents, findings: Findings, summary: Summary) -> None:
    """Show the end of a run in W&B, if it is shown there, and close it."""
    for logger in wandb_loggers(parts.trainer):
        if findings.samples:
            log_samples(logger, current_iteration(parts.trainer), "held_out", findings.samples)
        # Generators: what fails in them fails inside the guard.
        used, made = used_by(parts), made_by(parts.settings, parts.folder, summary)
        logger.guarded(partial(log_lineage, logger, used, made))
        logger.finish(summary.metrics, summary.gates)


def used_by(parts: TrainingComponents) -> Iterator[Origin]:
    """Yield the records that a stage was trained on and the models that it started from."""
    settings, data = parts.settings, parts.data
    records = data.source.records(data.kind, "train")
    yield Origin(
        role="data",
        name=f"{settings.dataset.name}-{data.kind}",
        kind="dataset",
        fingerprint=records_fingerprint(records),
        metadata={"records": len(records), "kind": data.kind},
    )
    for role, source in settings.artifacts.models().items():
        if is_loaded(settings, source):
            print_ = source_fingerprint(source, settings.model.revision)
            yield Origin(role, artifact_name(source), "model", print_, {})


def made_by(settings: TrainSettings, folder: RunFolder, summary: Summary) -> Iterator[Origin]:
    """Yield the model that a stage has made."""
    if not (folder.export / "config.json").is_file():
        return  # an adapter alone, or several models
    target = settings.artifacts.publish
    metadata: dict[str, Any] = {
        "stage": summary.stage,
        "passed": summary.passed,
        "metrics": {k: v for k, v in summary.metrics.items() if v is not None},
    }
    name = f"{settings.dataset.name}-{settings.name}" if target is None else artifact_name(target)
    # Of what later stages load: an export may be rounded.
    print_ = fingerprint(folder.export)
    with suppress(ManifestError):  # another run may have published over it
        loaded = read_manifest(str(target), verify=False) if settings.publishes else None
        if loaded is not None and loaded.run == str(folder.path):
            print_ = loaded.fingerprint
    yield Origin(settings.name, name, "model", print_, metadata)


def artifact_name(source: str) -> str:
    """Return what a model is called in W&B: the last two parts of its folder, or of a hub name."""
    return "-".join(Path(source).parts[-2:])
