"""The end of a stage: final figures, gates, export, artefact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from rlhf_lightning.assembly import STARTS_FROM, Parts, prompt_data
from rlhf_lightning.composition import plain
from rlhf_lightning.evaluation.stages import (
    Findings,
    check_gates,
    compare_policies,
    normalize_reward_model,
)
from rlhf_lightning.models.factory import export_policy, export_scalar_model, frozen, load_policy
from rlhf_lightning.runs.folder import RunFolder, SamplesAppender
from rlhf_lightning.runs.lock import artifact_lock
from rlhf_lightning.runs.manifest import publish_artifact
from rlhf_lightning.runs.model_card import write_model_card
from rlhf_lightning.runs.summary import GateResult


def finish(
    cfg: DictConfig, folder: RunFolder, parts: Parts
) -> tuple[Findings, tuple[GateResult, ...]]:
    """Measure, hold against the gates, export and publish what a stage has trained."""
    with _compute(parts):
        if cfg.stage == "reward":
            findings = _finish_reward(cfg, parts)
        else:
            findings = _finish_policy(cfg, parts)
    gates = check_gates(plain(cfg.gates), findings.metrics)
    if findings.samples:
        SamplesAppender(folder.samples).append(parts.data.num_iterations, findings.samples)
    export(cfg, folder, parts)
    write_model_card(
        folder.export,
        stage=cfg.stage,
        base=cfg.artifacts[STARTS_FROM[cfg.stage]],
        data=cfg.world.name,
        run=folder.name,
        metrics=findings.metrics,
        gates=gates,
    )
    if cfg.artifacts.publish is not None:
        target = Path(cfg.artifacts.publish)
        base = cfg.artifacts[STARTS_FROM[cfg.stage]]
        with _publishing(target):
            publish_artifact(
                folder.export,
                target,
                stage=cfg.stage,
                run=str(folder.path),
                metrics=findings.metrics,
                gates=gates,
                base=base,
            )
    return findings, gates


@contextmanager
def _publishing(target: Path) -> Iterator[None]:
    # A parent process that waits for this artefact holds the folder's own lock.
    with artifact_lock(target.with_name(f"{target.name}.publish")):
        yield


@contextmanager
def _compute(parts: Parts) -> Iterator[None]:
    """The precision of training, for what happens after `fit`."""
    with parts.trainer.strategy.precision_plugin.forward_context():
        yield


def _validation(parts: Parts) -> dict[str, float]:
    loader = parts.data.val_dataloader()
    parts.trainer.limit_val_batches = 1.0
    results = parts.trainer.validate(parts.module, dataloaders=loader, verbose=False)
    return dict(results[0]) if results else {}


def _finish_policy(cfg: DictConfig, parts: Parts) -> Findings:
    """Compare the policy with the one it started from, on held-out prompts."""
    metrics = _validation(parts) if cfg.stage == "sft" else {}
    start = cfg.artifacts[STARTS_FROM[cfg.stage]]
    if start is None or (cfg.stage == "sft" and cfg.evaluation.gold is None):
        return Findings(metrics)  # nothing to compare with, or nobody to judge
    module = parts.module
    baseline = module.reference if cfg.stage == "ppo" else frozen(load_policy(start))
    data = prompt_data(cfg, parts.tokenizer, num_prompts=cfg.evaluation.num_prompts)
    gold = cfg.evaluation.gold
    findings = compare_policies(
        module.policy,
        baseline,
        data.val_dataloader(),
        parts.sampling,
        seed=cfg.seed,
        gold=None if gold is None else instantiate(gold),
        scorer=parts.scorer,
        num_samples=cfg.evaluation.num_samples,
    )
    return Findings(metrics | findings.metrics, findings.samples)


def _finish_reward(cfg: DictConfig, parts: Parts) -> Findings:
    """Validate, add what the data knows of its own noise, and normalize."""
    metrics = _validation(parts)
    ceiling = getattr(parts.data.source, "label_ceiling", None)
    if ceiling is not None:
        metrics["val/label_ceiling"] = float(ceiling())
    count = parts.module.reward.normalization_samples
    if count:
        policy = frozen(load_policy(cfg.artifacts.sft))
        data = prompt_data(cfg, parts.tokenizer, num_prompts=count)
        metrics |= normalize_reward_model(
            parts.module.model, policy, data.train_dataloader(), parts.sampling, seed=cfg.seed
        )
    return Findings(metrics)


def export(cfg: DictConfig, folder: RunFolder, parts: Parts) -> None:
    """Write the trained model and its tokenizer as a Hugging Face folder."""
    if cfg.stage == "reward":
        model = parts.module.model
        pad = parts.tokenizer.pad_token_id
        export_scalar_model(model, folder.export, full_state(model), pad_token_id=pad)
    else:
        export_policy(parts.module.policy, folder.export, full_state(parts.module.policy))
    parts.tokenizer.save_pretrained(folder.export)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with every sharded tensor gathered, on the CPU."""
    state = model.state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
