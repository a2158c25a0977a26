"""The end of a stage: final figures, gates, export, artefact."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.app.build import Parts, origin
from rlhf_lightning.app.config.compose import plain
from rlhf_lightning.app.evaluation import STARTS_FROM, held_out_comparison, prompt_data
from rlhf_lightning.app.model_export import Outcome, publishes, write_model_folder
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.callbacks.wandb_content import (
    Origin,
    log_lineage,
    log_samples,
    records_fingerprint,
    wandb_loggers,
)
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.data.summary import data_counts
from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.evaluation.final_metrics import (
    Findings,
    held_out_loss,
    normalize_reward_model,
    score_spread,
)
from rlhf_lightning.evaluation.gates import check_gates
from rlhf_lightning.evaluation.generate import side_by_side
from rlhf_lightning.evaluation.reward_accuracy import (
    ScoredPair,
    comparable_rows,
    pair_measures,
    score_pairs,
    share_right,
)
from rlhf_lightning.evaluation.safety import required_measures
from rlhf_lightning.models.factory import frozen, load_policy, load_scalar_model
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.precision import release_freed_memory, round_frozen_weights
from rlhf_lightning.models.tokenizers import check_same_tokenizer
from rlhf_lightning.runs.folder import RunFolder, SamplesAppender, read_metrics
from rlhf_lightning.runs.lock import artifact_lock
from rlhf_lightning.runs.manifest import (
    ManifestError,
    fingerprint,
    publish_artifact,
    read_manifest,
    source_fingerprint,
)
from rlhf_lightning.runs.summary import GateResult, Summary

logger = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", bound=nn.Module)
MOST_TRAINING_PAIRS = 1000  # that are scored once more, to hold against held-out ones


def finish(
    cfg: DictConfig, folder: RunFolder, parts: Parts
) -> tuple[Findings, tuple[GateResult, ...]]:
    """Measure, hold against the gates, export and publish what a stage has trained.

    Every rank measures the same; the first alone writes.
    """
    _let_go(parts)
    begun = time.perf_counter()
    with _precision(parts):
        if cfg.stage == "reward":
            findings = _finish_reward(cfg, parts)
        else:
            findings = _finish_policy(cfg, parts)
    findings.metrics.update(data_counts(list(parts.data.summaries.values())))
    if cfg.stage == "ppo" and parts.trainer.is_global_zero:
        findings.metrics |= score_spread(read_metrics(folder.metrics))
    measured = time.perf_counter()
    required = required_measures((cfg.get("safety") or {}).get("prompts"))
    gates = check_gates(plain(cfg.gates), findings.metrics, required=required)
    model = _trained(cfg, parts)
    state = full_state(model)  # every rank takes part in gathering it
    if isinstance(model, AdaptedPolicy | AdaptedScalarModel):
        model.base.drop_weights()  # it is about to be read once more
        release_freed_memory()
    if parts.trainer.is_global_zero:
        _write_samples(folder, current_iteration(parts.trainer), findings)
        outcome = Outcome(folder.name, findings.metrics, gates)
        _export(cfg, folder, (model, parts.tokenizer, state), outcome)
    findings.seconds = {"measure": measured - begun, "export": time.perf_counter() - measured}
    return findings, gates


def _let_go(parts: Parts) -> None:
    """Free what only training needed: measuring may read one more model."""
    for optimizer in parts.trainer.optimizers:
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
    release_freed_memory()


def _write_samples(folder: RunFolder, iteration: int, findings: Findings) -> None:
    samples = SamplesAppender(folder.samples)
    samples.drop("baseline_response")  # of a run that was killed after this and resumed
    if findings.samples:
        samples.append(iteration, findings.samples)


def _export(
    cfg: DictConfig,
    folder: RunFolder,
    trained: tuple[PolicyModel | ScalarHeadModel, PreTrainedTokenizerBase, dict[str, Tensor]],
    outcome: Outcome,
) -> None:
    """Write `export/`, and publish the same weights in fp32, which are written once."""
    full = folder.path / ".full_precision"
    shutil.rmtree(full, ignore_errors=True)  # of a run that was killed here and resumed
    try:
        write_model_folder(
            cfg, folder.export, *trained, outcome, full=full if publishes(cfg) else None
        )
        if publishes(cfg):
            _publish(cfg, folder, full if full.is_dir() else folder.export, outcome)
    finally:
        shutil.rmtree(full, ignore_errors=True)


def _publish(cfg: DictConfig, folder: RunFolder, source: Path, outcome: Outcome) -> None:
    target = Path(cfg.artifacts.publish)
    with _publishing(target):
        publish_artifact(
            source,
            target,
            stage=cfg.stage,
            run=str(folder.path),
            metrics=outcome.metrics,
            gates=outcome.gates,
            base=cfg.artifacts[STARTS_FROM[cfg.stage]],
        )


@contextmanager
def _publishing(target: Path) -> Iterator[None]:
    # A parent process that waits for this artefact holds the folder's own lock.
    with artifact_lock(target.with_name(f"{target.name}.publish")):
        yield


@contextmanager
def _precision(parts: Parts) -> Iterator[None]:
    """The precision of training, for what happens after `fit`."""
    with parts.trainer.strategy.precision_plugin.forward_context():
        yield


def _placed(parts: Parts, model: ModelT) -> ModelT:
    """Put a model where training was: Lightning leaves its own on the CPU after `fit`."""
    return model.to(parts.trainer.strategy.root_device)


def _trained(cfg: DictConfig, parts: Parts) -> PolicyModel | ScalarHeadModel:
    model: PolicyModel | ScalarHeadModel
    model = parts.module.model if cfg.stage == "reward" else parts.module.policy
    return model


def _validation(parts: Parts) -> dict[str, float]:
    trainer, loader = parts.trainer, parts.data.val_dataloader()
    trainer.limit_val_batches = 1.0
    # Lightning would log a row behind the last iteration; the summary gets these values.
    loggers, trainer.loggers = trainer.loggers, []
    try:
        results = trainer.validate(parts.module, dataloaders=loader, verbose=False)
    finally:
        trainer.loggers = loggers
    return dict(results[0]) if results else {}


def _finish_policy(cfg: DictConfig, parts: Parts) -> Findings:
    """Compare the policy with the one it started from, on held-out prompts."""
    metrics = _validation(parts) if cfg.stage == "sft" else {}
    start = cfg.artifacts[STARTS_FROM[cfg.stage]]
    if start is None:
        return Findings(metrics)  # nothing to compare with
    module = parts.module
    if cfg.stage == "sft" and cfg.evaluation.gold is None and module.device_mesh is not None:
        return Findings(metrics)  # nobody to judge, and no room for a second model that is whole
    baseline = module.reference if cfg.stage == "ppo" else _start(cfg, module.policy)
    if cfg.stage == "sft" and metrics:
        loader = parts.data.val_dataloader()
        metrics["val/baseline_loss"] = held_out_loss(module, _placed(parts, baseline), loader)
        if cfg.evaluation.gold is None:
            return Findings(metrics)  # nobody to judge
    comparison = held_out_comparison(
        cfg,
        parts.tokenizer,
        parts.sampling,
        parts.scorer,
        num_prompts=cfg.evaluation.num_prompts,
    )
    if comparison is None:
        logger.warning("no prompt is held out: the policy is not compared with %s", start)
        return Findings(metrics)
    mine = comparison.ask_policy(_placed(parts, module.policy), _placed(parts, baseline))
    theirs = comparison.ask_baseline(baseline)
    samples = side_by_side(mine.main, theirs.main, cfg.evaluation.num_samples)
    return Findings(metrics | comparison.measure(mine, theirs), samples)


def _finish_reward(cfg: DictConfig, parts: Parts) -> Findings:
    """Validate, add what the data knows of its own noise, and normalize."""
    metrics = _validation(parts)
    ceiling = getattr(parts.data.source, "label_ceiling", None)
    if ceiling is not None:
        metrics["val/label_ceiling"] = float(ceiling())
    if rows := cast("Sequence[EncodedPreference]", parts.data.rows("validation")):
        metrics |= pair_measures(_scored(cfg, parts, parts.module.model, rows))
        metrics |= _evidence(cfg, parts, rows)
    count = parts.module.reward.normalization_samples
    if count:
        policy = _start(cfg, parts.module.model)
        data = prompt_data(cfg, parts.tokenizer, num_prompts=count)
        metrics |= normalize_reward_model(
            _placed(parts, parts.module.model),
            _placed(parts, policy),
            data.train_dataloader(),
            parts.sampling,
            seed=cfg.seed,
        )
    return Findings(metrics)


def _evidence(cfg: DictConfig, parts: Parts, rows: Sequence[EncodedPreference]) -> dict[str, float]:
    """Return what tells overfitting, noise and too small a model apart."""
    train = cast("Sequence[EncodedPreference]", parts.data.rows("train"))
    found = {}
    if seen := comparable_rows(train, rows, count=min(len(rows), MOST_TRAINING_PAIRS)):
        found["val/train_accuracy"] = share_right(_scored(cfg, parts, parts.module.model, seen))
    source = cfg.evaluation.larger_reward_model
    if source is not None:
        fix = "train it on the same policy's tokenizer"
        check_same_tokenizer(parts.tokenizer, source, fix=fix)
        larger = frozen(load_scalar_model(source))
        found["val/larger_model_accuracy"] = share_right(_scored(cfg, parts, larger, rows))
    return found


def _scored(
    cfg: DictConfig, parts: Parts, model: ScalarHeadModel, rows: Sequence[EncodedPreference]
) -> list[ScoredPair]:
    return score_pairs(
        _placed(parts, model),
        rows,
        batch_size=cfg.evaluation.batch_size,
        pad_token_id=int(parts.tokenizer.pad_token_id),  # type: ignore[arg-type]
    )


def _start(cfg: DictConfig, trained: PolicyModel | ScalarHeadModel) -> PolicyModel:
    """Return the policy that the stage started from, frozen; of an adapter the base itself."""
    if isinstance(trained, AdaptedPolicy | AdaptedScalarModel):
        return frozen(AdaptedPolicy(trained.base, None))
    policy = frozen(load_policy(cfg.artifacts[STARTS_FROM[cfg.stage]], **origin(cfg)))
    round_frozen_weights(policy.model, str(cfg.trainer.precision))
    return policy


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
