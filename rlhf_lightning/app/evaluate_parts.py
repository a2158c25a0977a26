"""From the configuration of an evaluation to its parts: checks first, then models and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.config.compose import ConfigError, check_gates_config, conf_dir, plain
from rlhf_lightning.app.config.schema import EvaluationSettings, TopSettings, build_checked
from rlhf_lightning.app.config.targets import TargetError, check_names, check_targets, did_you_mean
from rlhf_lightning.app.prerequisites import KINDS, is_available, prepare_inputs
from rlhf_lightning.runs.manifest import ManifestError, read_manifest

if TYPE_CHECKING:
    from rlhf_lightning.data.records import PromptRecord
    from rlhf_lightning.evaluation.generate import Sampling
    from rlhf_lightning.evaluation.held_out import HeldOutComparison, Questions
    from rlhf_lightning.evaluation.metrics import Judges
    from rlhf_lightning.preferences.candidates import LoadedPolicy

SPLITS = ("train", "validation")
SPREAD = "reward/sample_std"  # by which the reward stage divided its scores
PRECISIONS = ("32-true", "bf16-mixed")
HUMAN = ("none", "export", "import")


def check_evaluation(cfg: DictConfig, trusted: tuple[str, ...] = ()) -> None:
    """Refuse what nothing reads, what is of a wrong type, and what may not be built.

    It imports nothing heavy.

    Raises:
        ConfigError: with what was found and what to write.
    """
    written: Any = OmegaConf.load(conf_dir() / "evaluate.yaml")
    groups = [next(iter(item)) for item in written.defaults if isinstance(item, DictConfig)]
    known = sorted({*map(str, written), *map(str, groups)} - {"defaults", "hydra"})
    for key in map(str, cfg):
        if key not in known and key != "hydra":
            raise ConfigError(f"unknown top-level key {key!r}{did_you_mean(key, known)}")
    for group in ("prompts", "people", "artifacts"):
        keys = list(map(str, written[group]))
        for key in map(str, cfg[group]):
            if key not in keys:
                raise ConfigError(f"unknown key {group}.{key}{did_you_mean(key, keys)}")
    for key, value, allowed in (
        ("human", cfg.human, HUMAN),
        ("prompts.split", cfg.prompts.split, SPLITS),
        ("references", cfg.references, (True, False)),
        ("trainer.precision", cfg.trainer.precision, PRECISIONS),
    ):
        if value not in allowed:
            hint = did_you_mean(str(value), [str(item) for item in allowed])
            names = ", ".join(str(item).lower() for item in allowed)
            raise ConfigError(f"{key}={value} must be one of {names}{hint}")
    if cfg.human == "import" and cfg.people.run is None:
        raise ConfigError("human=import needs people.run=FOLDER of the evaluation that exported")
    missing = sorted(key for key in OmegaConf.missing_keys(cfg) if not key.startswith("model."))
    if missing:
        raise ConfigError(f"{missing[0]} is not set: add {missing[0]}=...")
    check_gates_config(cfg)
    values = {key: value for key, value in plain(cfg.evaluation).items() if key != "gold"}
    try:
        build_checked(TopSettings, {"seed": cfg.seed, "name": cfg.name}, "")
        build_checked(EvaluationSettings, values, "evaluation")
        check_names(OmegaConf.to_container(cfg, resolve=False), trusted)
    except (TargetError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if values.get("every_n_iterations") is not None:
        raise ConfigError("evaluation.every_n_iterations is for training: leave it out")


def prepare_sides(cfg: DictConfig, overrides: list[str]) -> None:
    """Make sure that the models which are used exist; the built-in ones are trained if need be.

    Raises:
        ConfigError: for a missing path that the user gave.
    """
    source = OmegaConf.select(cfg, "scorer.source")
    used = {cfg.policy, cfg.baseline, source}
    for side in ("policy", "baseline"):
        value = cfg[side]
        if not isinstance(value, str):
            raise ConfigError(f"{side}={value!r} must be a folder or a hub name")
        if value not in cfg.artifacts.values() and not is_available(value):
            raise ConfigError(f"{side}={value} does not exist: give a model folder or a hub name")
    # What the scorer compares its tokenizer with is the policy, whatever model that is.
    if cfg.scorer is not None and "policy" in cfg.scorer:
        cfg.scorer.policy = cfg.policy
    kinds = [kind for kind in KINDS if cfg.artifacts.get(kind) in used]
    prepare_inputs(cfg, overrides, kinds=kinds)


@dataclass(frozen=True)
class Sides:
    """What an evaluation asks and whom.

    Args:
        policy, baseline: the two sides.
        comparison: asks and measures; its questions and sampling are the policy's.
        baseline_questions, baseline_sampling: the same, as the baseline's tokenizer reads them.
        same_tokenizer: whether the KL between the two can be measured.
        records: the prompts that are asked.
    """

    policy: LoadedPolicy
    baseline: LoadedPolicy
    comparison: HeldOutComparison
    baseline_questions: Questions
    baseline_sampling: Sampling
    same_tokenizer: bool
    records: Sequence[PromptRecord]


def build_sides(cfg: DictConfig, trusted: tuple[str, ...] = ()) -> Sides:
    """Load both policies, the scorer and the prompts.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    from rlhf_lightning.evaluation.held_out import HeldOutComparison

    source, judges, scorer = _judges(cfg, trusted)
    held_out = _prompts(cfg, source)
    policy, baseline = _load(cfg, cfg.policy), _load(cfg, cfg.baseline)
    same = _same_vocabulary(policy, baseline)
    if scorer is not None and not same and "policy" in cfg.scorer:
        raise ConfigError(
            f"scorer: the reward model reads the tokens of policy={cfg.policy}, and "
            f"baseline={cfg.baseline} has other ones: use scorer=text_reward_model "
            f"scorer.source={cfg.artifacts.reward}, or scorer=none"
        )
    for model in scorer.build() if scorer is not None else []:
        model.to(policy.model.device)
    records = _drawn(cfg, held_out, (policy, baseline))
    if not records:
        raise ConfigError(
            f"none of {len(held_out)} prompts has at most prompts.max_length="
            f"{cfg.prompts.max_length} tokens: raise it"
        )
    mine, theirs = _questions(cfg, records, (policy, baseline), judges)
    return Sides(
        policy,
        baseline,
        HeldOutComparison(mine, _sampling(cfg, policy), judges, cfg.seed, scorer),
        theirs,
        _sampling(cfg, baseline),
        same,
        records,
    )


def _judges(cfg: DictConfig, trusted: tuple[str, ...]) -> tuple[Any, Judges, Any]:
    """Return the source of prompts, who judges, and the scorer or None."""
    from rlhf_lightning.evaluation.metrics import Judges

    gold, safety, scorer = cfg.evaluation.gold, cfg.safety, cfg.scorer
    try:
        check_targets(plain(cfg), trusted)
        judges = Judges(
            None if gold is None else instantiate(gold),
            scored=scorer is not None,
            safety=None if safety is None else instantiate(safety, _convert_="all"),
        )
        built = None if scorer is None else instantiate(scorer)
        return instantiate(cfg.dataset.source), judges, built
    except (TargetError, ValueError, TypeError, InstantiationException) as error:
        raise ConfigError(str(error)) from error


def _questions(
    cfg: DictConfig,
    records: Sequence[PromptRecord],
    sides: Sequence[LoadedPolicy],
    judges: Judges,
) -> list[Questions]:
    """Return what each side is asked, as its tokenizer reads it."""
    from rlhf_lightning.evaluation.held_out import (
        Questions,
        encode_questions,
        encode_safety_prompts,
    )

    several = cfg.evaluation.answers_per_prompt
    tokenizers = [side.tokenizer for side in sides]
    same = {
        "max_prompt_length": cfg.prompts.max_length,
        "batch_size": cfg.evaluation.batch_size,
    }
    batches, _ = encode_questions(records, tokenizers, **same, answers_per_prompt=several)
    dangers = [] if judges.safety is None else judges.safety.records()
    try:
        safety = encode_safety_prompts(dangers, tokenizers, **same, setting="prompts.max_length")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    pairs = zip(batches, safety, strict=True)
    return [Questions(own, unsafe, several) for own, unsafe in pairs]


def _prompts(cfg: DictConfig, source: Any) -> list[PromptRecord]:
    found: list[PromptRecord] = source.records("prompts", cfg.prompts.split)
    if not found:
        raise ConfigError(f"dataset={cfg.dataset.name} has no prompts in {cfg.prompts.split}")
    return found


def _drawn(
    cfg: DictConfig, records: Sequence[PromptRecord], sides: Sequence[LoadedPolicy]
) -> list[PromptRecord]:
    """Return the prompts that are asked, each once.

    They are drawn as at the end of a stage, from all that are short enough: with its seed, number
    and length they are the same ones.
    """
    from rlhf_lightning.data.encode import encode_prompt
    from rlhf_lightning.data.records import prompt_key
    from rlhf_lightning.data.sampler import validation_part

    def fits(record: PromptRecord) -> bool:
        length = cfg.prompts.max_length
        return all(encode_prompt(record, s.tokenizer, max_length=length) is not None for s in sides)

    short = [record for record in records if fits(record)]
    drawn = validation_part(short, cfg.evaluation.num_prompts, cfg.seed)
    return list({prompt_key(record): record for record in drawn}.values())


def _load(cfg: DictConfig, source: str) -> LoadedPolicy:
    from rlhf_lightning.preferences.candidates import load_candidate_policy

    model = plain(cfg.model)
    return load_candidate_policy(
        source,
        chat_template_arguments=model.get("chat_template_arguments"),
        revision=None if Path(source).is_dir() else model.get("revision"),
        trust_remote_code=bool(model.get("trust_remote_code")),
    )


def _sampling(cfg: DictConfig, side: LoadedPolicy) -> Sampling:
    from rlhf_lightning.evaluation.generate import Sampling

    return Sampling(
        instantiate(cfg.rollout)(side.stop_ids, side.tokenizer.pad_token_id),
        side.tokenizer,
        temperature=cfg.evaluation.temperature,
        max_new_tokens=cfg.evaluation.max_new_tokens,
        micro_batch_size=cfg.evaluation.micro_batch_size,
    )


def _same_vocabulary(first: LoadedPolicy, second: LoadedPolicy) -> bool:
    one, other = first.tokenizer, second.tokenizer
    return one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id


def reward_spread(cfg: DictConfig) -> dict[str, float]:
    """Return what the reward stage divided its scores by: it makes a difference a log-odds.

    Nothing where a difference is none: scores of several models, of a function or a service, and
    those that the scorer scales or turns into probabilities itself.
    """
    source = OmegaConf.select(cfg, "scorer.source")
    if source is None or not Path(source).is_dir():
        return {}
    if cfg.scorer.get("output") == "probability" or cfg.scorer.get("std", 1.0) != 1.0:
        return {}
    try:
        value = read_manifest(source, verify=False).metrics.get(SPREAD)
    except ManifestError:
        return {}
    return {} if value is None else {SPREAD: value}
