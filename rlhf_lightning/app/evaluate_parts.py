"""The parts of an evaluation: models, prompts, judges and scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_lightning.app.config.commands import EvaluateSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import MODELS
from rlhf_lightning.app.prerequisites import is_available, prepare_inputs
from rlhf_lightning.data.encode import encode_prompt
from rlhf_lightning.data.first_screen import warn_of_cut_responses, warn_of_plain_prompts
from rlhf_lightning.data.records import PromptRecord, prompt_key
from rlhf_lightning.data.sampler import validation_part
from rlhf_lightning.evaluation.best_of import measure_best_of, sample_pool
from rlhf_lightning.evaluation.generate import Sampling, gold_scores
from rlhf_lightning.evaluation.held_out import (
    HeldOutComparison,
    Questions,
    SideResponses,
    encode_questions,
    encode_safety_prompts,
)
from rlhf_lightning.evaluation.metrics import Judges, by_prompt
from rlhf_lightning.preferences.candidates import LoadedPolicy, load_candidate_policy
from rlhf_lightning.rollout.scorers.base import reward_of
from rlhf_lightning.runs.manifest import ManifestError, read_manifest

SPREAD = "reward/sample_std"  # by which the reward stage divided its scores


def prepare_sides(settings: EvaluateSettings, overrides: list[str]) -> EvaluateSettings:
    """Make sure that the models which are used exist; the built-in ones are trained if need be.

    Returns:
        The settings, in which the scorer compares its tokenizer with that of the policy.

    Raises:
        ConfigError: for a missing path that the user gave.
    """
    scorer, models = settings.scorer, settings.artifacts.models()
    sides = {"policy": settings.policy, "baseline": settings.baseline}
    if not settings.compares_policies:
        sides = {}
    for side, value in sides.items():
        if value not in models.values() and not is_available(value):
            raise ConfigError(f"{side}={value} does not exist: give a model folder or a hub name")
    used: set[str | None] = set(sides.values())
    if scorer is not None and (settings.benchmark is None or not sides):
        used.add(scorer.get("source"))
    kinds = [kind for kind in MODELS if models.get(kind) in used and kind in models]
    prepare_inputs(settings, overrides, kinds=kinds)
    if scorer is not None and "policy" in scorer.arguments:
        return settings.updated({"scorer.policy": settings.policy if sides else None})
    return settings


@dataclass(frozen=True)
class Sides:
    """Both sides of an evaluation, and the comparison between them.

    Args:
        policy, baseline: policy and baseline.
        comparison: samples and compares; its questions and sampling are the policy's.
        baseline_questions, baseline_sampling: the same, as the baseline's tokenizer reads them.
        same_tokenizer: whether the KL between the two can be measured.
        records: records of the prompts.
    """

    policy: LoadedPolicy
    baseline: LoadedPolicy
    comparison: HeldOutComparison
    baseline_questions: Questions
    baseline_sampling: Sampling
    same_tokenizer: bool
    records: Sequence[PromptRecord]


def build_sides(settings: EvaluateSettings) -> Sides:
    """Load both policies, the scorer and the prompts.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    source, judges, scorer = _judges(settings)
    held_out = _prompts(settings, source)
    policy, baseline = load_side(settings, settings.policy), load_side(settings, settings.baseline)
    same = _same_vocabulary(policy, baseline)
    reads_tokens = settings.scorer is not None and "policy" in settings.scorer.arguments
    if reads_tokens and not same:
        raise ConfigError(
            f"scorer: the reward model reads the tokens of policy={settings.policy}, and "
            f"baseline={settings.baseline} has other ones: use scorer=text_reward_model "
            f"scorer.source={settings.artifacts.reward}, or scorer=none"
        )
    for model in scorer.build() if scorer is not None else []:
        model.to(policy.model.device)
    records = _drawn(settings, held_out, (policy, baseline))
    if not records:
        raise ConfigError(
            f"none of {len(held_out)} prompts has at most prompts.max_length="
            f"{settings.prompts.max_length} tokens: raise it"
        )
    longest, key = settings.evaluation.max_new_tokens, "evaluation.max_new_tokens"
    warn_of_plain_prompts(records, policy.tokenizer)
    warn_of_cut_responses(source, settings.prompts.split, policy.tokenizer, longest, key=key)
    mine, theirs = _questions(settings, records, (policy, baseline), judges)
    return Sides(
        policy,
        baseline,
        HeldOutComparison(mine, _sampling(settings, policy), judges, settings.seed, scorer),
        theirs,
        _sampling(settings, baseline),
        same,
        records,
    )


def _judges(settings: EvaluateSettings) -> tuple[Any, Judges, Any]:
    """Return the source of prompts, the judges, and the scorer or None."""
    gold, safety, scorer = settings.evaluation.gold, settings.safety, settings.scorer
    try:
        built = reward_of(None if scorer is None else scorer.build())
        judges = Judges(
            None if gold is None else gold.build(),
            scored=built is not None,
            safety=None if safety is None else safety.build(),
        )
        return settings.dataset.source.build(), judges, built
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def _questions(
    settings: EvaluateSettings,
    records: Sequence[PromptRecord],
    sides: Sequence[LoadedPolicy],
    judges: Judges,
) -> list[Questions]:
    """Return what each side is asked, as its tokenizer reads it."""
    several = settings.evaluation.answers_per_prompt
    tokenizers = [side.tokenizer for side in sides]
    same: dict[str, Any] = {
        "max_prompt_length": settings.prompts.max_length,
        "batch_size": settings.evaluation.batch_size,
    }
    batches, _ = encode_questions(records, tokenizers, **same, answers_per_prompt=several)
    dangers = [] if judges.safety is None else judges.safety.records()
    try:
        safety = encode_safety_prompts(dangers, tokenizers, **same, setting="prompts.max_length")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    pairs = zip(batches, safety, strict=True)
    return [Questions(own, unsafe, several) for own, unsafe in pairs]


def _prompts(settings: EvaluateSettings, source: Any) -> list[PromptRecord]:
    found: list[PromptRecord] = source.records("prompts", settings.prompts.split)
    if not found:
        raise ConfigError(
            f"dataset={settings.dataset.name} has no prompts in {settings.prompts.split}"
        )
    return found


def _drawn(
    settings: EvaluateSettings, records: Sequence[PromptRecord], sides: Sequence[LoadedPolicy]
) -> list[PromptRecord]:
    """Return the prompts that are asked, each once.

    They are drawn as at the end of a stage, from all that are short enough: with its seed, number
    and length they are the same ones.
    """

    def fits(record: PromptRecord) -> bool:
        length = settings.prompts.max_length
        return all(encode_prompt(record, s.tokenizer, max_length=length) is not None for s in sides)

    short = [record for record in records if fits(record)]
    drawn = validation_part(short, settings.evaluation.num_prompts, settings.seed)
    return list({prompt_key(record): record for record in drawn}.values())


def load_side(settings: EvaluateSettings, source: str) -> LoadedPolicy:
    """Return the policy of a folder or hub name."""
    model = settings.model
    return load_candidate_policy(
        source,
        **model.template,
        revision=None if Path(source).is_dir() else model.revision,
        trust_remote_code=model.trust_remote_code,
        precision=settings.trainer.precision,
    )


def _sampling(settings: EvaluateSettings, side: LoadedPolicy) -> Sampling:
    return Sampling(
        settings.rollout.build()(side.stop_ids, side.tokenizer.pad_token_id),
        side.tokenizer,
        temperature=settings.evaluation.temperature,
        max_new_tokens=settings.evaluation.max_new_tokens,
        micro_batch_size=settings.evaluation.micro_batch_size,
        skip_special_tokens=settings.evaluation.skip_special_tokens,
    )


def _same_vocabulary(first: LoadedPolicy, second: LoadedPolicy) -> bool:
    one, other = first.tokenizer, second.tokenizer
    return one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id


def measured_best_of(
    settings: EvaluateSettings, sides: Sides, theirs: SideResponses
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return `best_of/<n>/...` of policy against baseline, and the scores of the pool.

    Both are empty if the best of n is not requested.
    """
    if not settings.best_of.n:
        return {}, []
    comparison = sides.comparison
    assert comparison.scorer is not None  # or the settings were refused
    (batches,), _ = encode_questions(
        sides.records,
        [sides.policy.tokenizer],
        max_prompt_length=settings.prompts.max_length,
        batch_size=settings.evaluation.batch_size,
    )
    gold = comparison.judges.gold
    pool = sample_pool(
        sides.policy.model,
        batches,
        comparison.sampling,
        comparison.scorer,
        size=settings.best_of.pool,
        seed=settings.seed,
        gold=gold,
    )
    rival = None if gold is None else gold_scores(gold, theirs.main)
    found = measure_best_of(
        pool,
        sorted(set(settings.best_of.n)),
        baseline_gold=None if rival is None else by_prompt(rival, len(sides.records)),
    )
    count, size = pool.scores.shape
    scores = pool.scores.flatten().tolist()
    return found, [{"held_out": "pool", "score": scores, "groups": [size] * count}]


def reward_spread(settings: EvaluateSettings) -> dict[str, float]:
    """Return the reward stage's divisor of its scores: it makes a difference a log-odds.

    Nothing where a difference is none: scores of several models, of a function or a service, and
    those that the scorer scales or turns into probabilities itself.
    """
    scorer = settings.scorer
    source = None if scorer is None else scorer.get("source")
    if scorer is None or source is None or not Path(source).is_dir():
        return {}
    if scorer.get("output") == "probability" or scorer.get("std", 1.0) != 1.0:
        return {}
    try:
        value = read_manifest(source, verify=False).metrics.get(SPREAD)
    except ManifestError:
        return {}
    return {} if value is None else {SPREAD: value}
