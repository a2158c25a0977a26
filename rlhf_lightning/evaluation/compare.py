"""The held-out win rate of one policy over another, from Python."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import (
    Count,
    CountOrZero,
    Default,
    Length,
    PathOrName,
    Seed,
    Size,
    Temperature,
    checked,
)
from rlhf_lightning.data.encode import OverLong
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.data.sources.base import RecordSource
from rlhf_lightning.data.sources.given import Rows, WholeSource, as_source
from rlhf_lightning.data.summary import warn_of_plain_prompts
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.evaluation.gates import CheckedGate, check_gates
from rlhf_lightning.evaluation.generate import GoldReward, Sampling
from rlhf_lightning.evaluation.held_out import HeldOutComparison, held_out_comparison
from rlhf_lightning.evaluation.safety import SafetyCheck, required_measures
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.models.classifiers import prompt_room
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.precision import MIXED_BF16, round_frozen_weights
from rlhf_lightning.modules.pretrained import naming_argument
from rlhf_lightning.modules.rewards import as_scorer
from rlhf_lightning.rollout.generators.base import Generator
from rlhf_lightning.rollout.generators.captured import CapturedGenerator
from rlhf_lightning.rollout.scorers.base import reward_of
from rlhf_lightning.rollout.scorers.http import ServiceError
from rlhf_lightning.rollout.teachers import Teacher
from rlhf_lightning.runs.summary import GateResult
from rlhf_lightning.text.tokenizers import check_same_tokenizer, load_tokenizer, stop_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Comparison:
    """The comparison of a policy with a baseline on the same held-out prompts.

    Args:
        win_rate: share of prompts on which the policy's response is better, ties one half: by the
            gold reward where there is one, else by the reward.
        low, high: its 95 % interval; see docs/evaluation.md.
        num_prompts: number of prompts.
        metrics: everything that was measured, as `val/*`; see docs/metrics.md.
        samples: prompts with a response of each side.
        gates: results of `gates`.
    """

    win_rate: float
    low: float
    high: float
    num_prompts: int
    metrics: Mapping[str, float] = field(repr=False)
    samples: Sequence[Mapping[str, Any]] = field(repr=False)
    gates: tuple[GateResult, ...] = ()


class ComparisonOptions(TypedDict, total=False):
    """Options of a comparison, during training and after it; see `compare`."""

    gold: GoldReward | None
    safety: SafetyCheck | None
    answers_per_prompt: Annotated[Size, Default(1)]
    max_new_tokens: Size | None
    temperature: Temperature | None
    batch_size: Annotated[Size, Default(64)]
    micro_batch_size: Size | None
    skip_special_tokens: bool | None


@checked(but=("prompts", "reward"))
def compare(
    policy: PathOrName | nn.Module,
    baseline: PathOrName | nn.Module,
    prompts: str | Path | Rows | RecordSource | RecordDataModule,
    *,
    reward: Any = None,
    gates: Mapping[str, CheckedGate] | None = None,
    num_prompts: Count = 400,
    num_samples: CountOrZero | None = None,
    max_prompt_length: Length | None = None,
    seed: Seed = 1,
    **options: Unpack[ComparisonOptions],
) -> Comparison:
    """Return the win rate of `policy` over `baseline` on held-out prompts, by `reward` or `gold`.

    Both respond to the same prompts, sampled at `temperature` with independent noise. The reward
    that a policy was trained on shows how far training went, not how good the responses are: for
    that give `gold`, which no stage has seen.

    After `fit` by a Trainer of `trainer_arguments` the run's summary and report show it.

    Args:
        policy: a module with a trained policy, or the folder or hub name of one.
        baseline: the other side, in the same forms.
        prompts: a DataModule or a source, whose held-out part is used, or a path, a hub name or
            rows, which are used whole. Of the data that the policy was trained on, the part that
            training held out is used in either form.
        reward: function, folder or hub name of a reward model, or scorer; see `PPOModule`. None for
            the one that the policy was trained on, if it was.
        gold: a function `(prompts, completions, finished, **columns) -> list of numbers`.
        safety: prompts that must be refused, and the detector of refusals.
        gates: gates by name, such as `{"moved": {"metric": "val/kl_per_token", "at_least": 0.01}}`.
        num_prompts: largest number of prompts, a random part of the held-out ones.
        num_samples: number of samples to keep; None for all.
        answers_per_prompt: responses of each side to each prompt.
        max_new_tokens: longest response in tokens; None for that of the policy's training, else 64.
        max_prompt_length: longer prompts are left out; None for the DataModule's, else 512, if that
            leaves room for a response in the policy's context.
        temperature: sampling temperature, 0 for the likeliest token; None for that of the policy's
            training, else 1.
        batch_size: prompts in one batch of generation.
        micro_batch_size: rows of a forward of the KL; None for all of a batch.
        skip_special_tokens: leave special tokens out of the responses' texts; None as in the
            policy's training.
        seed: seeds the choice of prompts and the sampling.

    Raises:
        ManifestError: if `baseline` is what the policy was trained from, and another model now.
        TypeError: if there is neither a reward nor a gold reward.
        ValueError: if no prompt is held out, the two tokenizers differ, or the reward scores no
            pair of responses.
    """
    mine = _side(policy, "policy")
    theirs = _baseline(policy, mine, baseline)
    reward = getattr(policy, "scorer", None) if reward is None else reward
    scorer = None if reward is None else as_scorer(reward, mine.source, mine.tokenizer)
    gold = options["gold"]
    if gold is None and reward_of(scorer) is None:
        raise TypeError("compare needs reward=, a function or a reward model, or gold=")
    comparison = comparison_of(
        policy,
        prompts,
        side=mine,
        scorer=scorer,
        num_prompts=num_prompts,
        max_prompt_length=max_prompt_length,
        seed=seed,
        **options,
    )
    if comparison is None:
        fix = "give validation_fraction=, validation_path= or max_prompt_length="
        raise ValueError(f"no prompt of {prompts} that is short enough is held out: {fix}")
    found = sample_sides(policy, comparison, mine.model, theirs.model, num_samples)
    judge = gold or (str(reward) if isinstance(reward, str | Path) else scorer)
    return _judged(policy, comparison, found, gates or {}, theirs.name, judge)


def sample_sides(
    policy: Any,
    comparison: HeldOutComparison,
    model: PolicyModel,
    baseline: PolicyModel,
    num_samples: int | None,
) -> Findings:
    """Sample the model of `policy` and the baseline, in the precision of its training."""
    scorer, device = comparison.scorer, model.device
    if scorer is not None and scorer is not getattr(policy, "scorer", None):
        for part in scorer.build(None) or ():
            part.to(device)
    teacher = _teacher(policy, comparison, device)
    with precision_of(trainer_of(policy)):
        mine = comparison.ask_policy(model, baseline, teacher)
        theirs = comparison.ask_baseline(baseline, teacher)
        return comparison.findings(mine, theirs, num_samples)


def _judged(
    policy: Any,
    comparison: HeldOutComparison,
    found: Findings,
    gates: Mapping[str, Any],
    baseline: str,
    judge: Any,
) -> Comparison:
    """Return what was found, with gates, and add it to the run of the policy's training."""
    trainer, safety = trainer_of(policy), comparison.safety
    by = "val/score_win_rate" if comparison.gold is None else "val/gold_win_rate"
    if by not in found.metrics:
        fix = "compare by a reward that applies to them"
        raise ValueError(f"no score: no prompt has two responses with one: {fix}")
    required = required_measures(None if safety is None else safety.prompts)
    results = check_gates(gates, found.metrics, required=required)
    for callback in getattr(trainer, "callbacks", ()):
        if hasattr(callback, "on_compare_end"):
            callback.on_compare_end(trainer, found, results, baseline, judge)
    rate, low, high = (found.metrics[f"{by}{end}"] for end in ("", "_low", "_high"))
    asked = int(found.metrics["val/num_prompts"])
    return Comparison(rate, low, high, asked, found.metrics, found.samples, results)


def comparison_of(
    policy: Any,
    prompts: Any,
    *,
    side: _Side | None = None,
    max_new_tokens: int | None = None,
    max_prompt_length: int | None = None,
    temperature: float | None = None,
    micro_batch_size: int | None = None,
    skip_special_tokens: bool | None = None,
    source: RecordSource | None = None,
    over_long: OverLong | None = None,
    **judged: Any,
) -> HeldOutComparison | None:
    """Return the comparison of a policy on held-out prompts; None if none can be asked.

    The arguments are those of `compare`, and those of `held_out_comparison`. A `source` is asked in
    place of that of a DataModule `prompts`, which may read other pairs (`path`).
    """
    side = _side(policy, "policy") if side is None else side
    source, data = _held_out(policy, prompts) if source is None else (source, prompts)
    usual = getattr(policy, "sampling", None) or SamplingHparams(max_new_tokens=64)
    skip = usual.skip_special_tokens if skip_special_tokens is None else skip_special_tokens
    sampling = Sampling(
        generator_of(policy, side.tokenizer, side.source),
        side.tokenizer,
        temperature=usual.temperature if temperature is None else temperature,
        max_new_tokens=max_new_tokens or usual.max_new_tokens,
        micro_batch_size=micro_batch_size,
        skip_special_tokens=skip,
    )
    wanted = 512 if data is None else data.max_length
    longest = max_prompt_length or prompt_room(side.model, wanted, sampling.max_new_tokens)
    records: Any = source.records("prompts", "validation")
    usually = "drop" if data is None else data.over_long
    lengths: Any = {"max_prompt_length": longest, "over_long": over_long or usually}
    comparison = held_out_comparison(records, [sampling], **lengths, **judged)
    if comparison is not None and isinstance(source, WholeSource):
        asked, rows = len(comparison.records), source.num_rows()
        left = "; long and repeated prompts, and num_prompts, leave out the others"
        unknown = ". If it was trained on some, give the DataModule or source of that training"
        if told := left * (asked < rows) + unknown * (trainer_of(policy) is None):
            logger.warning("%d of all %d rows are asked%s", asked, rows, told)
    if data is None:  # else the DataModule has said it
        warn_of_plain_prompts(records, side.tokenizer)
    return comparison


def _teacher(policy: Any, comparison: HeldOutComparison, device: torch.device) -> Teacher | None:
    """Return the policy's teacher, if it can be asked about these prompts."""
    teacher: Teacher | None = getattr(policy, "teacher", None)
    if teacher is None:
        return None
    columns = (
        {name: values[row] for name, values in batch.columns.items()}
        for batch in comparison.sides[0].batches
        for row in range(len(batch))
    )
    try:
        teacher.check(columns, temperature=comparison.sides[0].sampling.temperature or 1.0)
    except (ValueError, ServiceError) as error:
        logger.warning("the KL to the teacher is not measured: %s", error)
        return None
    return teacher.to(device)


def _held_out(policy: Any, prompts: Any) -> tuple[RecordSource, RecordDataModule | None]:
    """Return the source whose held-out part is asked, and the DataModule that it is of."""
    if isinstance(prompts, RecordDataModule):
        return prompts.source, prompts
    source = as_source(prompts, "prompts")
    data = getattr(trainer_of(policy), "datamodule", None)
    if source is prompts:
        return source, None
    if isinstance(data, RecordDataModule):
        mine = _origin(source)
        for own in (data.source, *getattr(data.source, "sources", ())):  # of a mix
            if mine is not None and mine == _origin(own):
                return own, data
    return WholeSource(source), None


def _origin(source: Any) -> Any:
    """Return what two sources of the same rows have in common; one file has several names."""
    if (path := getattr(source, "path", None)) is not None:
        return Path(path).expanduser().resolve()
    label, rows = getattr(source, "label", None), getattr(source, "rows", None)
    return None if label is None else (label, id(rows))


@dataclass(frozen=True)
class _Side:
    """One side of a comparison: its policy, and the folder or hub name whose tokenizer it has."""

    model: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    name: str


def _side(policy: Any, name: str) -> _Side:
    if isinstance(policy, str | Path):
        with naming_argument(name, policy):
            model, tokenizer = frozen(load_policy(policy)), load_tokenizer(policy)
        return _Side(model, tokenizer, str(policy), str(policy))
    model = getattr(policy, "policy", None)
    if not isinstance(model, PolicyModel):
        fix = "give a module after fit or load_from_checkpoint, a folder or a hub name"
        raise TypeError(f"{name} is a {type(policy).__name__} without a trained policy: {fix}")
    trainer, source = trainer_of(policy), start_of(policy)
    if trainer is not None:
        model = model.to(trainer.strategy.root_device)
    name = f"{type(policy).__name__} trained from {source}"
    return _Side(model, policy.tokenizer, source, name)


def _baseline(policy: Any, mine: _Side, baseline: Any) -> _Side:
    if isinstance(baseline, PolicyModel):  # with the tokenizer of the policy
        return _Side(baseline.to(mine.model.device), mine.tokenizer, mine.source, mine.source)
    if isinstance(policy, nn.Module) and str(baseline) == mine.source:
        return _Side(start_policy(policy), mine.tokenizer, mine.source, mine.source)
    theirs = _side(baseline, "baseline")
    check_same_tokenizer(mine.tokenizer, theirs.source, fix="compare policies of one tokenizer")
    return theirs


def trainer_of(module: object) -> Any:
    """Return the Trainer of a module's last fit, else the one that has it, else None."""
    return getattr(module, "fitted_by", None) or getattr(module, "_trainer", None)


def precision_of(trainer: Any) -> AbstractContextManager[Any]:
    """Return the context of a Trainer's steps; None has none."""
    if trainer is None:
        return nullcontext()
    return trainer.strategy.precision_plugin.forward_context()  # type: ignore[no-any-return]


def generator_of(module: Any, tokenizer: Any, source: str) -> Generator:
    """Return the generator of a module, or the usual one, which stops as `source` says."""
    own: Generator | None = getattr(module, "generator", None)
    return own or CapturedGenerator(stop_ids(tokenizer, source), int(tokenizer.pad_token_id))


def start_of(module: Any) -> str:
    """Return the folder or hub name of the model that a module started from."""
    return str(module.hparams.get("policy") or module.hparams.get("source"))


def start_policy(module: Any) -> PolicyModel:
    """Return the frozen policy that a module started from, on the device of its training.

    It is the reference of the module, or the base that its adapter was trained on, or read again.

    Raises:
        ManifestError: if another model has replaced it.
    """
    trainer = trainer_of(module)
    device = module.device if trainer is None else trainer.strategy.root_device
    if isinstance(reference := getattr(module, "reference", None), PolicyModel):
        return reference.to(device)
    trained = getattr(module, "model", None) or getattr(module, "policy", None)
    if isinstance(trained, AdaptedPolicy | AdaptedScalarModel):
        return frozen(AdaptedPolicy(trained.base, None)).to(device)
    origin = ("revision", "trust_remote_code")
    given = {name: module.hparams[name] for name in origin if name in module.hparams}
    with device:
        policy = frozen(load_policy(start_of(module), **given))
    if module.source is not None:
        module.source.check()  # behind the load: it may take minutes
    if trainer is not None:
        in_bf16 = module.compute_dtype == torch.bfloat16
        round_frozen_weights(policy.model, MIXED_BF16 if in_bf16 else trainer.precision)
    return policy
