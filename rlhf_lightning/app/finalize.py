"""The end of a stage: final figures, gates, export, artifact."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import is_loaded
from rlhf_lightning.app.evaluation import (
    TrainingComponents,
    answers_of,
    compare,
    gates_of,
    num_answered,
    num_shown,
    placed,
    prompt_length,
    start_policy,
    validate,
)
from rlhf_lightning.app.model_export import Outcome, write_model_folder
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.wandb_logger import (
    Origin,
    log_lineage,
    log_samples,
    records_fingerprint,
    wandb_loggers,
)
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.evaluation.final_metrics import Findings, held_out_loss, trained_findings
from rlhf_lightning.evaluation.normalization import fold_normalization, normalization_prompts
from rlhf_lightning.evaluation.reward_accuracy import score_pairs, share_right
from rlhf_lightning.models.factory import frozen, load_scalar_model
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules.export import Trained
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.modules.sft import SFTModule
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.lock import artifact_lock
from rlhf_lightning.runs.manifest import (
    ManifestError,
    fingerprint,
    publish_artifact,
    read_manifest,
    source_fingerprint,
)
from rlhf_lightning.runs.publish import replacing_folder
from rlhf_lightning.runs.summary import GateResult, Summary
from rlhf_lightning.text.tokenizers import check_same_tokenizer


def finish(
    settings: TrainSettings, folder: RunFolder, parts: TrainingComponents
) -> tuple[Findings, tuple[GateResult, ...]]:
    """Measure the trained model, check its gates, export and publish it.

    Every rank measures the same; the first alone writes.
    """
    release_freed_memory()  # of the optimizer: measuring may read one more model
    begun = time.perf_counter()
    with cast(Any, parts.trainer.strategy.precision_plugin).forward_context():  # that of training
        shown = _shown(settings, folder, parts)
        if settings.spec.trains_policy:
            findings = _compared_policy(settings, parts)
        else:
            findings = _normalized_model(settings, parts)
    findings.metrics = {**shown.metrics, **findings.metrics}
    findings.values = findings.values or shown.values
    measured = time.perf_counter()
    gates = gates_of(settings, findings.metrics)
    model = parts.module.trained
    state = full_state(model)  # every rank takes part in gathering it
    if isinstance(model, AdaptedPolicy | AdaptedScalarModel):
        model.base.drop_weights()  # it is about to be read once more
        release_freed_memory()
    if parts.trainer.is_global_zero:
        findings.write(folder, current_iteration(parts.trainer))
        outcome = Outcome(folder.name, findings.metrics, gates)
        trained = Trained(
            model,
            parts.tokenizer,
            state,
            cast(Any, parts.module).source,
            trust_remote_code=settings.model.trust_remote_code,
        )
        _export(settings, folder, trained, outcome)
    findings.seconds = {"measure": measured - begun, "export": time.perf_counter() - measured}
    return findings, gates


def _shown(settings: TrainSettings, folder: RunFolder, parts: TrainingComponents) -> Findings:
    """Return the metrics of all held-out records, and what else the training shows by itself."""
    metrics = {} if settings.spec.rolls_out else validate(parts)
    rows = read_metrics(folder.metrics) if parts.trainer.is_global_zero else []
    placed(parts, parts.module.trained)
    batch_size = settings.evaluation.batch_size
    found = trained_findings(parts.module, parts.data, rows, batch_size=batch_size)
    found.metrics = metrics | found.metrics
    return found


def _compared_policy(settings: TrainSettings, parts: TrainingComponents) -> Findings:
    """Compare the policy with its start; where nothing judges, show responses of both."""
    module, gold = parts.module, settings.evaluation.gold
    if settings.start is None:
        return Findings({})  # nothing to compare with
    if not isinstance(module, SFTModule):
        baseline = start_policy(settings, parts)
        if parts.scorer is None and settings.scorer is not None:
            parts.scorer = settings.scorer.build()
            for model in parts.scorer.build():
                placed(parts, model)
        return compare(settings, parts, baseline)
    if gold is None and module.device_mesh is not None:
        return Findings({})  # no judge, and no room for a second whole model
    baseline, metrics = start_policy(settings, parts), dict[str, float]()
    if parts.data.rows("validation"):
        loader = parts.data.val_dataloader()
        metrics["val/baseline_loss"] = held_out_loss(module, placed(parts, baseline), loader)
    if gold is None:
        shown = num_shown(settings) if parts.data.rows("validation") else 0
        return Findings(metrics, answers_of(settings, parts, baseline, shown))
    findings = compare(settings, parts, baseline)
    findings.metrics |= metrics
    return findings


def _normalized_model(settings: TrainSettings, parts: TrainingComponents) -> Findings:
    """Hold a larger model against the reward model, if there is one, and normalize its scores."""
    metrics, model = _larger_model(settings, parts), cast(RewardModule, parts.module).model
    count = num_answered(settings)
    if count:
        policy = start_policy(settings, parts)
        prompts = normalization_prompts(
            settings.data.source.build(),
            parts.tokenizer,
            num_samples=count,
            batch_size=settings.evaluation.batch_size,
            max_prompt_length=prompt_length(settings),
            seed=settings.seed,
            over_long=settings.data.arguments["over_long"],
        )
        metrics |= fold_normalization(
            placed(parts, model),
            placed(parts, policy),
            prompts,
            parts.sampling,
            seed=settings.seed,
        )
    return Findings(metrics)


def _larger_model(settings: TrainSettings, parts: TrainingComponents) -> dict[str, float]:
    """Return the accuracy of a larger model, which tells noise and too small a model apart."""
    rows = cast("Sequence[EncodedPreference]", parts.data.rows("validation"))
    source = settings.evaluation.larger_reward_model
    if source is None or not rows:
        return {}
    fix = "train it on the same policy's tokenizer"
    check_same_tokenizer(parts.tokenizer, source, fix=fix)
    with parts.trainer.strategy.root_device:
        model = frozen(load_scalar_model(source))
    scored = score_pairs(
        model,
        rows,
        batch_size=settings.evaluation.batch_size,
        pad_token_id=int(parts.tokenizer.pad_token_id),  # type: ignore[arg-type]
    )
    return {"val/larger_model_accuracy": share_right(scored)}


def _export(settings: TrainSettings, folder: RunFolder, trained: Trained, outcome: Outcome) -> None:
    """Write `export/`, and publish the same weights in fp32, which are written once."""
    full = folder.path / ".full_precision"
    shutil.rmtree(full, ignore_errors=True)  # of a run that was killed here and resumed
    try:
        with replacing_folder(folder.export, ours=True) as staging:
            kept = full if settings.publishes else None
            write_model_folder(settings, staging, trained, outcome, full=kept)
        if settings.publishes:
            target = Path(str(settings.artifacts.publish))
            # A parent process that waits for this artifact holds the folder's own lock.
            with artifact_lock(target.with_name(f"{target.name}.publish")):
                publish_artifact(
                    full if full.is_dir() else folder.export,
                    target,
                    stage=settings.stage,
                    run=str(folder.path),
                    metrics=outcome.metrics,
                    gates=outcome.gates,
                    base=settings.start,
                )
    finally:
        shutil.rmtree(full, ignore_errors=True)


def finish_tracking(
    settings: TrainSettings,
    folder: RunFolder,
    parts: TrainingComponents,
    findings: Findings,
    summary: Summary,
) -> None:
    """Show the end of a run in W&B, if it is shown there, and close it."""
    for logger in wandb_loggers(parts.trainer):
        if findings.samples:
            log_samples(logger, current_iteration(parts.trainer), "held_out", findings.samples)
        logger.guarded(
            lambda logger=logger: log_lineage(
                logger, used_by(settings, parts), made_by(settings, folder, summary)
            )
        )
        logger.finish(summary.metrics, summary.gates)


def used_by(settings: TrainSettings, parts: TrainingComponents) -> Iterator[Origin]:
    """Yield the records that a stage was trained on and the models that it started from."""
    data = parts.data
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
