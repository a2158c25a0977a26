"""The parts of an evaluation: models, prompts, judges and scorer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_lightning.app.config.commands import EvaluateSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import MODELS
from rlhf_lightning.app.config.inherit import read_training
from rlhf_lightning.app.config.saved import working_folder
from rlhf_lightning.app.prerequisites import check_world, is_available, prepare_inputs
from rlhf_lightning.data.encode import OVER_LONG, EncodingReport, encode_prompt
from rlhf_lightning.data.records import PromptRecord, prompt_key
from rlhf_lightning.data.sampler import validation_part
from rlhf_lightning.data.sources.base import FileSource, files_of
from rlhf_lightning.data.sources.given import WholeSource
from rlhf_lightning.data.summary import (
    warn_of_plain_prompts,
)
from rlhf_lightning.evaluation.generate import Sampling, gold_scores
from rlhf_lightning.evaluation.held_out import (
    HeldOutComparison,
    Questions,
    SideResponses,
    encode_questions,
    encode_safety_prompts,
    prompt_room,
)
from rlhf_lightning.evaluation.metrics import Judges, by_prompt, measure_best_of, sample_pool
from rlhf_lightning.preferences.candidates import LoadedPolicy, load_candidate_policy
from rlhf_lightning.rollout.scorers.base import reward_of
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import ManifestError, content_digest, read_manifest

UNLIMITED = 1 << 30
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
    sides = sides if settings.compares_policies else {}
    for side, value in sides.items():
        if value not in models.values() and not is_available(value):
            raise ConfigError(f"{side}={value} does not exist: give a model folder or a hub name")
    check_world(settings, sides.values())
    used: set[str | None] = set(sides.values())
    if scorer is not None and (settings.benchmark is None or not sides):
        used.add(scorer.get("source"))
    kinds = [kind for kind in MODELS if models.get(kind) in used and kind in models]
    prepare_inputs(settings, overrides, kinds=kinds)
    if scorer is not None and "policy" in scorer.arguments:
        return settings.updated({"scorer.policy": settings.policy if sides else None})
    return settings


def choose_prompts(settings: EvaluateSettings, overrides: Sequence[str]) -> EvaluateSettings:
    """Return the settings with the part of the dataset whose prompts are asked.

    A file or a set of the hub that the command line names is asked whole, unless it has a held-out
    part of its own or a policy was trained on it.
    """
    if settings.prompts.split is not None:
        return settings
    keys = {word.lstrip("+").partition("=")[0] for word in overrides}
    if not keys & {"dataset.path", "dataset.hub_name"} or _has_held_out_part(settings):
        return settings.updated({"prompts.split": "validation"})
    whole = {"evaluation.num_prompts": UNLIMITED, "prompts.max_length": None}
    free = {key: value for key, value in whole.items() if key not in keys}
    return settings.updated({"prompts.split": "all"} | free)


def _has_held_out_part(settings: EvaluateSettings) -> bool:
    source = settings.dataset.source.build()
    if isinstance(source, FileSource) and source.files("validation"):
        return True
    files = {path.resolve() for path in files_of(source)}
    digests = {content_digest(path) for path in files if path.exists()}
    for folder in _training_runs(settings):
        with suppress(ConfigError):
            trained = read_training(folder).dataset
            path = working_folder(folder) / str(trained.source.get("path"))
            name = settings.dataset.hub_name
            is_same = name is not None and trained.hub_name == name
            is_same |= any(file.is_relative_to(path.resolve()) for file in files)
            if is_same or (path.is_file() and content_digest(path) in digests):
                return True
    return False


def _training_runs(settings: EvaluateSettings) -> Iterator[RunFolder]:
    """Yield the runs that trained the policies, as far as they are known and still there."""
    if settings.run is not None:
        yield RunFolder(Path(settings.run))
    for model in (settings.policy, settings.baseline):
        yield RunFolder(Path(model).parent)  # of its export/
        with suppress(ManifestError):
            yield RunFolder(Path(read_manifest(model, verify=False).run))


@dataclass(frozen=True)
class Sides:
    """Both sides of an evaluation, and the comparison between them.

    Args:
        policy, baseline: policy and baseline.
        comparison: samples and compares; its questions and sampling are the policy's.
        baseline_questions, baseline_sampling: the same, as the baseline's tokenizer reads them.
        same_tokenizer: whether the KL between the two can be measured.
        max_prompt_length: longest prompt, in tokens.
        records: records of the prompts.
        num_rows: rows of the file, or of the part that is asked.
        unused: reason -> rows that are not asked.
    """

    policy: LoadedPolicy
    baseline: LoadedPolicy
    comparison: HeldOutComparison
    baseline_questions: Questions
    baseline_sampling: Sampling
    same_tokenizer: bool
    max_prompt_length: int
    records: Sequence[PromptRecord]
    num_rows: int
    unused: Mapping[str, int]


def build_sides(settings: EvaluateSettings) -> Sides:
    """Load both policies, the scorer and the prompts.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    source, judges, scorer = _judges(settings)
    held_out, num_rows, unused = _prompts(settings, source)
    policy, baseline = load_side(settings, settings.policy), load_side(settings, settings.baseline)
    one, other = policy.tokenizer, baseline.tokenizer
    same = one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id
    if settings.scorer is not None and "policy" in settings.scorer.arguments and not same:
        raise ConfigError(
            f"scorer: the reward model reads the tokens of policy={settings.policy}, and "
            f"baseline={settings.baseline} has other ones: use scorer=text_reward_model "
            f"scorer.source={settings.artifacts.reward}, or scorer=none"
        )
    for model in scorer.build() if scorer is not None else []:
        model.to(policy.model.device)
    longest = settings.evaluation.max_new_tokens
    room = min(prompt_room(side.model, UNLIMITED, longest) for side in (policy, baseline))
    most = settings.prompts.max_length or room
    records = _drawn(settings, held_out, (policy, baseline), most, unused)
    if not records:
        raise ConfigError(
            f"none of {len(held_out)} prompts has at most prompts.max_length={most} tokens: raise "
            "it, or give shorter prompts"
        )
    warn_of_plain_prompts(records, policy.tokenizer)
    mine, theirs = _questions(settings, records, (policy, baseline), judges, most)
    return Sides(
        policy,
        baseline,
        HeldOutComparison(mine, _sampling(settings, policy), judges, settings.seed, scorer),
        theirs,
        _sampling(settings, baseline),
        same,
        most,
        records,
        num_rows,
        unused,
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
        source = settings.dataset.source.build()
        return WholeSource(source) if settings.prompts.split == "all" else source, judges, built
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def _questions(
    settings: EvaluateSettings,
    records: Sequence[PromptRecord],
    sides: Sequence[LoadedPolicy],
    judges: Judges,
    max_prompt_length: int,
) -> list[Questions]:
    """Return what each side is asked, as its tokenizer reads it."""
    several, size = settings.evaluation.answers_per_prompt, settings.evaluation.batch_size
    tokenizers = [side.tokenizer for side in sides]
    same: dict[str, Any] = {"max_prompt_length": max_prompt_length, "batch_size": size}
    batches, _ = encode_questions(records, tokenizers, **same, answers_per_prompt=several)
    dangers = [] if judges.safety is None else judges.safety.records()
    try:
        safety = encode_safety_prompts(dangers, tokenizers, **same, setting="prompts.max_length")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    pairs = zip(batches, safety, strict=True)
    return [Questions(own, unsafe, several) for own, unsafe in pairs]


def _prompts(
    settings: EvaluateSettings, source: Any
) -> tuple[list[PromptRecord], int, Counter[str]]:
    """Return the prompts, the number of rows, and reason -> rows that are no prompt to ask."""
    found: list[PromptRecord] = source.records("prompts", settings.prompts.part)
    if not found:
        split = settings.prompts.split
        raise ConfigError(f"dataset={settings.dataset.name} has no prompts in {split}")
    if not isinstance(source, WholeSource):
        return found, len(found), Counter()
    rows, bad = source.num_rows(), len(getattr(source.source, "skipped_records", ()))
    return found, rows, Counter({_BAD: bad, _AGAIN: rows - bad - len(found)})


_BAD, _AGAIN = "bad (dataset.source.on_bad_record=skip)", "with the prompt of an earlier row"


def _drawn(
    settings: EvaluateSettings,
    records: Sequence[PromptRecord],
    sides: Sequence[LoadedPolicy],
    max_length: int,
    unused: Counter[str],
) -> list[PromptRecord]:
    """Return the prompts that are asked, each once; the others are counted in `unused`.

    They are drawn as at the end of a stage, from all that are short enough: with its seed, number
    and length they are the same ones.
    """
    over_long = f"of more than prompts.max_length={max_length} tokens"

    def fits(record: PromptRecord) -> bool:
        report = EncodingReport()
        given: dict[str, Any] = {"max_length": max_length, "report": report}
        if all(encode_prompt(record, side.tokenizer, **given) is not None for side in sides):
            return True
        (reason,) = report.dropped or [_BAD]
        unused[over_long if reason == OVER_LONG else reason] += 1
        return False

    short = [record for record in records if fits(record)]
    drawn = validation_part(short, settings.evaluation.num_prompts, settings.seed)
    asked = list({prompt_key(record): record for record in drawn}.values())
    left = f"not drawn (evaluation.num_prompts={settings.evaluation.num_prompts})"
    unused.update({left: len(short) - len(drawn), _AGAIN: len(drawn) - len(asked)})
    return asked


def load_side(settings: EvaluateSettings, source: str) -> LoadedPolicy:
    """Return the policy of a folder or hub name."""
    model, precision = settings.model, settings.trainer.precision
    return load_candidate_policy(source, **model.template, **model.origin, precision=precision)


def _sampling(settings: EvaluateSettings, side: LoadedPolicy) -> Sampling:
    engine = settings.rollout.build()(side.stop_ids, side.tokenizer.pad_token_id)
    return Sampling(engine, side.tokenizer, **settings.evaluation.decoding)


def measured_best_of(
    settings: EvaluateSettings, sides: Sides, theirs: SideResponses
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return `best_of/<n>/...` of policy against baseline, and the scores of the pool.

    Both are empty if the best of n is not requested.
    """
    if not settings.best_of.n:
        return {}, []
    comparison, size = sides.comparison, settings.best_of.pool
    assert comparison.scorer is not None  # or the settings were refused
    (batches,), _ = encode_questions(
        sides.records,
        [sides.policy.tokenizer],
        max_prompt_length=sides.max_prompt_length,
        batch_size=settings.evaluation.batch_size,
    )
    gold = comparison.judges.gold
    how: dict[str, Any] = {"size": size, "seed": settings.seed, "gold": gold}
    model = sides.policy.model
    pool = sample_pool(model, batches, comparison.sampling, comparison.scorer, **how)
    count = len(sides.records)
    rival = None if gold is None else by_prompt(gold_scores(gold, theirs.main), count)
    found = measure_best_of(pool, sorted(set(settings.best_of.n)), baseline_gold=rival)
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
    with suppress(ManifestError):
        value = read_manifest(source, verify=False).metrics.get(SPREAD)
        return {} if value is None else {SPREAD: value}
    return {}
