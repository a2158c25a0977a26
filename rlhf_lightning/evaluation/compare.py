"""The held-out win rate of one policy over another, from Python."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import (
    Count,
    CountOrZero,
    Length,
    PathOrName,
    Seed,
    Size,
    Temperature,
    checked,
)
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.data.sources.base import RecordSource
from rlhf_lightning.data.sources.given import Rows, WholeSource, as_source
from rlhf_lightning.data.summary import warn_of_plain_prompts
from rlhf_lightning.evaluation.gates import CheckedGate, check_gates
from rlhf_lightning.evaluation.generate import GoldReward, Sampling
from rlhf_lightning.evaluation.held_out import (
    HeldOutComparison,
    Questions,
    held_out_comparison,
    prompt_room,
    start_in_memory,
    trainer_of,
)
from rlhf_lightning.evaluation.safety import SafetyCheck, required_measures
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.modules.pretrained import naming_argument
from rlhf_lightning.modules.rewards import as_scorer
from rlhf_lightning.rollout.generators.captured import CapturedGenerator
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


@checked(but=("prompts", "reward"))
def compare(
    policy: PathOrName | nn.Module,
    baseline: PathOrName | nn.Module,
    prompts: str | Path | Rows | RecordSource | RecordDataModule,
    *,
    reward: Any = None,
    gold: GoldReward | None = None,
    safety: SafetyCheck | None = None,
    gates: Mapping[str, CheckedGate] | None = None,
    num_prompts: Count = 400,
    num_samples: CountOrZero | None = None,
    answers_per_prompt: Size = 1,
    max_new_tokens: Size | None = None,
    max_prompt_length: Length | None = None,
    temperature: Temperature | None = None,
    batch_size: Size = 64,
    micro_batch_size: Size | None = None,
    seed: Seed = 1,
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
        seed: seeds the choice of prompts and the sampling.

    Raises:
        TypeError: if there is neither a reward nor a gold reward.
        ValueError: if no prompt is held out, the two tokenizers differ, or the reward scores no
            pair of responses.
    """
    mine = _side(policy, "policy")
    start = start_in_memory(policy) if str(baseline) == mine.source else None
    theirs = _side(baseline, "baseline") if start is None else _start_side(mine, start)
    check_same_tokenizer(mine.tokenizer, theirs.source, fix="compare policies of one tokenizer")
    reward = getattr(policy, "scorer", None) if reward is None else reward
    scorer = None if reward is None else as_scorer(reward, mine.source, mine.tokenizer)
    judges: dict[str, Any] = {"scorer": scorer, "gold": gold, "safety": safety, "seed": seed}
    source, data = _held_out(policy, prompts)
    sampling = _sampling(policy, mine, max_new_tokens, temperature, micro_batch_size)
    wanted = 512 if data is None else data.max_length
    longest = max_prompt_length or prompt_room(mine.model, wanted, sampling.max_new_tokens)
    comparison = held_out_comparison(
        source,
        sampling,
        **judges,
        num_prompts=num_prompts,
        answers_per_prompt=answers_per_prompt,
        max_prompt_length=longest,
        batch_size=batch_size,
        over_long="drop" if data is None else data.over_long,
    )
    if comparison is None:
        found = f"no prompt of {prompts} is held out with at most {longest} tokens"
        fix = "give a source with a validation part (validation_fraction=, validation_path=)"
        raise ValueError(f"{found}: {fix}")
    _warn_of_whole(source, comparison.questions, trained=trainer_of(policy) is not None)
    if data is None:  # else the DataModule has said it
        warn_of_plain_prompts(source.records("prompts", "validation"), mine.tokenizer)
    judge = gold or (str(reward) if isinstance(reward, str | Path) else scorer)
    return _compared(mine, theirs, comparison, judge, gates or {}, num_samples, policy)


def _compared(
    mine: _Side,
    theirs: _Side,
    comparison: HeldOutComparison,
    judge: Any,
    gates: Mapping[str, Any],
    num_samples: int | None,
    policy: Any,
) -> Comparison:
    scorer, gold = comparison.scorer, comparison.judges.gold
    if scorer is None and gold is None:
        raise TypeError("compare needs reward=, a function or a reward model, or gold=")
    if scorer is not None and scorer is not getattr(policy, "scorer", None):
        for model in scorer.build(None):
            model.to(mine.model.device)
    with mine.precision:
        findings = comparison.findings(
            mine.model,
            theirs.model,
            teacher=_teacher(policy, comparison, mine.model.device),
            num_samples=num_samples,
        )
    by = "val/score_win_rate" if gold is None else "val/gold_win_rate"
    if by not in findings.metrics:
        raise ValueError(
            "no score: the reward has none (None) for the two responses to any of the prompts; "
            "compare by one that applies to them"
        )
    safety = comparison.judges.safety
    required = required_measures(None if safety is None else safety.prompts)
    results = check_gates(gates, findings.metrics, required=required)
    for callback in getattr(mine.trainer, "callbacks", ()):
        if hasattr(callback, "on_compare_end"):
            callback.on_compare_end(mine.trainer, findings, results, theirs.name, judge)
    rate, low, high = (findings.metrics[f"{by}{end}"] for end in ("", "_low", "_high"))
    num_asked = int(findings.metrics["val/num_prompts"])
    return Comparison(rate, low, high, num_asked, findings.metrics, findings.samples, results)


def _teacher(policy: Any, comparison: HeldOutComparison, device: torch.device) -> Teacher | None:
    """Return the policy's teacher, if it can be asked about these prompts."""
    teacher: Teacher | None = getattr(policy, "teacher", None)
    if teacher is None:
        return None
    columns = (
        {name: values[row] for name, values in batch.columns.items()}
        for batch in comparison.questions.batches
        for row in range(len(batch))
    )
    try:
        teacher.check(columns, temperature=comparison.sampling.temperature or 1.0)
    except (ValueError, ServiceError) as error:
        logger.warning("the KL to the teacher is not measured: %s", error)
        return None
    return teacher.to(device)


def _warn_of_whole(source: RecordSource, questions: Questions, *, trained: bool) -> None:
    """Say how many rows are asked, and what a policy whose data are unknown may have seen."""
    if not isinstance(source, WholeSource):
        return
    asked = sum(map(len, questions.batches)) // questions.answers_per_prompt
    rows, left = source.num_rows(), ""
    if asked < rows:
        left = "; max_prompt_length, num_prompts and repeated prompts leave out the others"
    if not trained:
        left += (
            ". If the policy was trained on some of them, give the DataModule or the source of "
            "that training, whose held-out part is asked"
        )
    if left:
        logger.warning("%d of all %d rows are asked%s", asked, rows, left)


def _sampling(
    policy: Any,
    side: _Side,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    micro_batch_size: int | None = None,
) -> Sampling:
    """Return the sampling of both sides: that of the policy's training, except for given values."""
    sampled = getattr(policy, "sampling", None) or SamplingHparams(max_new_tokens=64)
    generator = getattr(policy, "generator", None)
    if generator is None:
        pad: Any = side.tokenizer.pad_token_id
        generator = CapturedGenerator(stop_ids(side.tokenizer, side.source), int(pad))
    return Sampling(
        generator,
        side.tokenizer,
        temperature=sampled.temperature if temperature is None else temperature,
        max_new_tokens=max_new_tokens or sampled.max_new_tokens,
        micro_batch_size=micro_batch_size,
        skip_special_tokens=sampled.skip_special_tokens,
    )


def comparison_in_training(
    module: OnPolicyModule, data: RecordDataModule, *, num_prompts: int, **judges: Any
) -> HeldOutComparison | None:
    """Return the comparison of a policy in training with its reference, for every few iterations.

    Args:
        module: module with policy, reference and scorer.
        data: data that it is trained on, with a held-out part.
        num_prompts: largest number of prompts.
        judges: `gold` and `safety`, as in `compare`.
    """
    side = _side(module, "policy")
    sampling = _sampling(module, side)
    return held_out_comparison(
        data.source,
        sampling,
        scorer=module.scorer,
        num_prompts=num_prompts,
        answers_per_prompt=1,
        max_prompt_length=prompt_room(side.model, data.max_length, sampling.max_new_tokens),
        batch_size=64,
        seed=module.hparams.get("seed", 1),
        over_long=data.over_long,
        **judges,
    )


def _held_out(policy: Any, prompts: Any) -> tuple[RecordSource, RecordDataModule | None]:
    """Return the source whose held-out part is asked, and the DataModule that it is of."""
    if isinstance(prompts, RecordDataModule):
        return prompts.source, prompts
    source = as_source(prompts, "prompts")
    data = getattr(trainer_of(policy), "datamodule", None)
    if source is prompts:
        return source, None
    if not isinstance(data, RecordDataModule):
        return WholeSource(source), None
    names: list[Any] = []
    for one in (source, data.source):  # one file has several names
        path = getattr(one, "path", None)
        name = getattr(one, "label", None) if path is None else Path(path).expanduser().resolve()
        names.append((id(getattr(one, "rows", None)), name))
    same = names[0] == names[1] and names[0][1] is not None
    return (data.source, data) if same else (WholeSource(source), None)


@dataclass(frozen=True)
class _Side:
    model: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    name: str
    trainer: Any
    precision: AbstractContextManager[Any]


def _start_side(mine: _Side, start: PolicyModel) -> _Side:
    return replace(mine, model=start.to(mine.model.device), name=mine.source, trainer=None)


def _side(policy: Any, name: str) -> _Side:
    if isinstance(policy, str | Path):
        with naming_argument(name, policy):
            model, tokenizer = frozen(load_policy(policy)), load_tokenizer(policy)
        return _Side(model, tokenizer, str(policy), str(policy), None, nullcontext())
    model = getattr(policy, "policy", None)
    if not isinstance(model, PolicyModel):
        raise TypeError(
            f"{name} is a {type(policy).__name__} that has no trained policy: give a PPOModule or "
            "SFTModule after fit or load_from_checkpoint, or the folder or hub name of a policy"
        )
    trainer = trainer_of(policy)
    context = nullcontext()
    if trainer is not None:
        model = model.to(trainer.strategy.root_device)
        context = trainer.strategy.precision_plugin.forward_context()
    source = str(policy.hparams.get("policy") or policy.hparams.get("source"))
    name = f"{type(policy).__name__} trained from {source}"
    return _Side(model, policy.tokenizer, source, name, trainer, context)
