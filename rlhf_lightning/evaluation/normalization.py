"""Scores of a reward model with mean 0 and standard deviation 1 over samples of the SFT policy."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch

from rlhf_lightning.arguments import Count, Length, Seed, Size, Temperature, checked
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.data.encode import OverLong
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.data.sources.base import RecordSource
from rlhf_lightning.data.sources.given import Rows, as_source
from rlhf_lightning.evaluation.compare import (
    generator_of,
    precision_of,
    start_of,
    start_policy,
    trainer_of,
)
from rlhf_lightning.evaluation.generate import Sampling, sample_batches, shared_among_ranks
from rlhf_lightning.functional.statistics import all_equal
from rlhf_lightning.models.building import in_eval_mode
from rlhf_lightning.models.classifiers import prompt_room
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import RewardModelScorer

logger = logging.getLogger(__name__)


class _Prompts(PromptDataModule):
    """Prompts that are answered and not trained on: of few, each is asked several times."""

    _may_repeat = True


@checked(but=("prompts",))
def normalize_reward_model(
    module: RewardModule,
    prompts: str | Path | Rows | RecordSource | RecordDataModule,
    *,
    num_samples: Count | None = None,
    max_new_tokens: Size = 64,
    max_prompt_length: Length | None = None,
    temperature: Temperature = 1.0,
    batch_size: Size = 128,
    micro_batch_size: Size | None = None,
    over_long: OverLong | None = None,
    seed: Seed = 1,
) -> dict[str, float]:
    """Give a trained reward model mean 0 and std 1 over samples of the policy it started from.

    `rlhf-train +experiment=reward` does the same. Call it between `fit` and `export_model`; the
    run's summary and report show it.

    Args:
        module: reward module after `fit`.
        prompts: a DataModule, or a source of one; its training part is used.
        num_samples: responses; None for `RewardHparams.normalization_samples`.
        max_new_tokens: longest response, in tokens.
        max_prompt_length: longer prompts are left out; None for the DataModule's, else 512, if that
            leaves room for a response in the policy's context.
        temperature: sampling temperature.
        batch_size: prompts in one batch of generation.
        micro_batch_size: rows of a forward of the reward model; None for all of a batch.
        over_long: what to do with longer prompts; None for what the DataModule does, else "drop".
        seed: seeds the sampling.

    Returns:
        `reward/sample_mean` and `reward/sample_std` before; nothing where all scores are equal.
    """
    data = prompts if isinstance(prompts, RecordDataModule) else None
    source = as_source(cast(Any, prompts), "prompts") if data is None else data.source
    tokenizer: Any = module.tokenizer
    policy, trainer = start_policy(module), trainer_of(module)
    generator = generator_of(module, tokenizer, start_of(module))
    wanted = 512 if data is None else data.max_length
    count = num_samples or module.algorithm.normalization_samples
    size = min(batch_size, count)
    batches = _Prompts(
        source,
        tokenizer,
        batch_size=size,
        num_iterations=-(-count // size),
        max_prompt_length=max_prompt_length or prompt_room(policy, wanted, max_new_tokens),
        seed=seed,
        over_long=over_long or ("drop" if data is None else data.over_long),
    ).train_dataloader()
    sampling = Sampling(generator, tokenizer, temperature, max_new_tokens, micro_batch_size)
    with precision_of(trainer):
        model = module.model.to(policy.device)
        found = fold_normalization(model, policy, batches, sampling, seed=seed)
    for callback in getattr(trainer, "callbacks", ()):
        if hasattr(callback, "on_normalize_end"):
            callback.on_normalize_end(trainer, found)
    return found


@torch.no_grad()
def fold_normalization(
    model: ScalarHeadModel,
    policy: PolicyModel,
    batches: Iterable[PromptBatch],
    sampling: Sampling,
    *,
    seed: int,
) -> dict[str, float]:
    """Fold mean 0 and std 1 over samples of the SFT policy into the head; ranks share the prompts.

    A model that gives all samples one score, or one that is not finite, is left as it is, and a
    warning says so: what it was trained to can still be looked at.

    Returns:
        `reward/sample_mean` and `reward/sample_std` before, so that they can be undone; nothing
        where the model was left as it is.
    """
    scorer = RewardModelScorer(lambda: model, micro_batch_size=sampling.micro_batch_size)
    scorer.model = model
    with in_eval_mode(model):
        answers = shared_among_ranks(
            list(batches),
            lambda own: sample_batches(
                policy, own, sampling, noise=RowNoise(seed, "normalization"), scorer=scorer
            ),
        )
    scores = torch.tensor(answers.scores, dtype=torch.float64)
    mean, std = float(scores.mean()), float(scores.std(correction=0))
    if all_equal(mean, std) or not math.isfinite(mean + std):
        told = (
            "the reward model is not normalized: it scores all %d samples alike (mean %g, std %g)"
        )
        logger.warning(told, len(scores), mean, std)
        return {}
    model.normalize(mean, std)
    return {"reward/sample_mean": mean, "reward/sample_std": std}
