"""The prompts of a stage for its evaluation, and the comparison that they are asked in."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.context_length import context_length, longest_prompt
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.evaluation.held_out import (
    HeldOutComparison,
    Questions,
    encode_safety_prompts,
    repeated,
)
from rlhf_lightning.evaluation.policy import Sampling
from rlhf_lightning.evaluation.safety import SafetyCheck
from rlhf_lightning.evaluation.sides import Judges
from rlhf_lightning.rollout.score import Scorer

# What a stage's tokenizer comes from: the model it starts from.
STARTS_FROM = {"sft": "base", "reward": "sft", "ppo": "sft"}


class EvaluationPrompts(PromptDataModule):
    """Prompts that are answered and not trained on: of few, each is asked several times."""

    _may_repeat = True


def prompt_data(
    cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, *, num_prompts: int
) -> PromptDataModule:
    """Return the prompts of the stage's records, for evaluation and normalization.

    Held out are at most `num_prompts`; of training prompts whole batches, at least `num_prompts`.
    """
    batch_size = min(cfg.evaluation.batch_size, num_prompts)
    return EvaluationPrompts(
        instantiate(cfg.data.source),
        tokenizer,
        batch_size=batch_size,
        num_iterations=-(-num_prompts // batch_size),
        max_prompt_length=_max_prompt_length(cfg),
        seed=cfg.seed,
        over_long=cfg.data.over_long,
        max_validation_rows=num_prompts,
        validation_batch_size=batch_size,
    )


def held_out_comparison(
    cfg: DictConfig,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    scorer: Scorer | None,
    *,
    num_prompts: int,
) -> HeldOutComparison | None:
    """Return what compares the stage's policy with its start; None if no prompt is held out.

    Args:
        cfg: of the stage.
        tokenizer: of the policy.
        sampling: how both answer.
        scorer: scores answers, or None.
        num_prompts: at most so many are asked.

    Raises:
        BadRecordError: for a file of safety prompts that cannot be read.
        ValueError: if all of its prompts of a kind are too long.
    """
    several = cfg.evaluation.answers_per_prompt
    data = prompt_data(cfg, tokenizer, num_prompts=num_prompts)
    batches = data.val_dataloader()
    if not batches:
        return None
    gold, safety = cfg.evaluation.gold, cfg.get("safety")
    check = None if safety is None else instantiate(safety, _convert_="all")
    asked = () if check is None else safety_prompts(cfg, tokenizer, check)
    judges = Judges(
        None if gold is None else instantiate(gold), scored=scorer is not None, safety=check
    )
    questions = Questions([p for b in batches for p in repeated(b, several)], asked, several)
    return HeldOutComparison(questions, sampling, judges, cfg.seed, scorer)


def safety_prompts(
    cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, check: SafetyCheck | None = None
) -> Sequence[PromptBatch]:
    """Return the prompts of the safety file of a stage, if it has one.

    Args:
        cfg: of the stage.
        tokenizer: of the policy.
        check: of the configuration; None to build it.

    Raises:
        BadRecordError: for a file that cannot be read.
        ValueError: if all prompts of a kind are too long.
    """
    if check is None:
        if not (cfg.get("safety") or {}).get("prompts"):
            return ()
        check = instantiate(cfg.safety, _convert_="all")
    (asked,) = encode_safety_prompts(
        check.records(),
        [tokenizer],
        max_prompt_length=_max_prompt_length(cfg),
        batch_size=cfg.evaluation.batch_size,
        setting="data.max_prompt_length" if "max_prompt_length" in cfg.data else "data.max_length",
    )
    return asked


def _max_prompt_length(cfg: DictConfig) -> int:
    return longest_prompt(cfg, context_length(cfg, cfg.artifacts[STARTS_FROM[cfg.stage]]))
