"""What the final evaluations of several stages have in common."""

from __future__ import annotations

import logging
from typing import TypeVar

from omegaconf import DictConfig
from torch import nn

from rlhf_lightning.app.build import origin
from rlhf_lightning.app.evaluation import held_out_comparison
from rlhf_lightning.app.stages.spec import Parts, start_of
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.evaluation.generate import side_by_side
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.precision import round_frozen_weights

logger = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", bound=nn.Module)


def placed(parts: Parts, model: ModelT) -> ModelT:
    """Put a model where training was: Lightning leaves its own on the CPU after `fit`."""
    return model.to(parts.trainer.strategy.root_device)


def validate(parts: Parts) -> dict[str, float]:
    """Return the metrics of all held-out records."""
    trainer, loader = parts.trainer, parts.data.val_dataloader()
    trainer.limit_val_batches = 1.0
    # Lightning would log a row behind the last iteration; the summary gets these values.
    loggers, trainer.loggers = trainer.loggers, []
    try:
        results = trainer.validate(parts.module, dataloaders=loader, verbose=False)
    finally:
        trainer.loggers = loggers
    return dict(results[0]) if results else {}


def start_policy(cfg: DictConfig, trained: PolicyModel | ScalarHeadModel) -> PolicyModel:
    """Return the policy that the stage started from, frozen; of an adapter the base itself."""
    if isinstance(trained, AdaptedPolicy | AdaptedScalarModel):
        return frozen(AdaptedPolicy(trained.base, None))
    policy = frozen(load_policy(str(start_of(cfg)), **origin(cfg)))
    round_frozen_weights(policy.model, str(cfg.trainer.precision))
    return policy


def compare(
    cfg: DictConfig, parts: Parts, baseline: PolicyModel, metrics: dict[str, float]
) -> Findings:
    """Compare the trained policy with `baseline` on held-out prompts.

    Args:
        cfg: of the stage.
        parts: with what was trained.
        baseline: the policy that the stage started from.
        metrics: that are known already.
    """
    comparison = held_out_comparison(
        cfg,
        parts.tokenizer,
        parts.sampling,
        parts.scorer,
        num_prompts=cfg.evaluation.num_prompts,
    )
    if comparison is None:
        start = start_of(cfg)
        logger.warning("no prompt is held out: the policy is not compared with %s", start)
        return Findings(metrics)
    mine = comparison.ask_policy(placed(parts, parts.module.policy), placed(parts, baseline))
    theirs = comparison.ask_baseline(baseline)
    samples = side_by_side(mine.main, theirs.main, cfg.evaluation.num_samples)
    return Findings(metrics | comparison.measure(mine, theirs), samples)
