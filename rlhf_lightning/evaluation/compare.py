"""The held-out win rate of one policy over another, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import Count, Length, PathOrName, Seed, Size, Temperature, checked
from rlhf_lightning.data.first_screen import warn_of_cut_responses, warn_of_plain_prompts
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.data.sources.base import RecordSource
from rlhf_lightning.data.sources.given import Rows, as_source
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.evaluation.generate import Sampling, side_by_side, values_of
from rlhf_lightning.evaluation.held_out import HeldOutComparison, Questions, encode_questions
from rlhf_lightning.evaluation.metrics import Judges
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.modules.pretrained import as_scorer, naming_argument
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.scorers.base import Scorer
from rlhf_lightning.runs.source import reads_one_model
from rlhf_lightning.text.tokenizers import check_same_tokenizer, load_tokenizer, stop_ids

WIN_RATE = "val/score_win_rate"


@dataclass(frozen=True)
class Comparison:
    """The comparison of a policy with a baseline on the same held-out prompts.

    Args:
        win_rate: share of prompts on which the policy's answer scores higher, ties one half.
        low, high: its 95 % interval; see docs/evaluation.md.
        num_prompts: that both were asked.
        metrics: everything that was measured, as `val/*`; see docs/metrics.md.
        samples: prompts with an answer of each side.
    """

    win_rate: float
    low: float
    high: float
    num_prompts: int
    metrics: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]]


@checked(but=("prompts", "reward"))
def compare(
    policy: PathOrName | nn.Module,
    baseline: PathOrName | nn.Module,
    prompts: str | Path | Rows | RecordSource | RecordDataModule,
    *,
    reward: Any,
    num_prompts: Count = 400,
    answers_per_prompt: Size = 1,
    max_new_tokens: Size | None = None,
    max_prompt_length: Length | None = None,
    temperature: Temperature | None = None,
    batch_size: Size = 64,
    seed: Seed = 1,
) -> Comparison:
    """Return the win rate of `policy` over `baseline` on held-out prompts, by `reward`.

    Both answer the same prompts, sampled at `temperature` with noise of their own. A reward that a
    policy was trained on says how far training went, not how good the answers are: for that give
    one that no stage has seen.

    After `fit` by a Trainer of `trainer_arguments` the run's summary and report show it.

    Args:
        policy: a module with a trained policy, or the folder or hub name of one.
        baseline: likewise.
        prompts: a DataModule, or what one takes as its source; its held-out part is asked. The data
            that the policy was trained on have the held-out part of that training.
        reward: function, folder or hub name of a reward model, or scorer; see `PPOModule`.
        num_prompts: how many are asked at most; the first of the held-out part.
        answers_per_prompt: of each side.
        max_new_tokens: of a response; None for what the policy was trained with, else 64.
        max_prompt_length: longer prompts are left out; None for the DataModule's, else 512.
        temperature: of sampling, 0 for the likeliest token; None for what the policy was trained
            with, else 1.
        batch_size: prompts that are answered together.
        seed: of sampling.

    Raises:
        ValueError: if no prompt is held out, the two tokenizers differ, or the reward scores no
            pair of responses.
    """
    mine, theirs = _side(policy, "policy"), _side(baseline, "baseline")
    check_same_tokenizer(mine.tokenizer, theirs.source, fix="compare policies of one tokenizer")
    scorer = as_scorer(reward, mine.source, mine.tokenizer)
    source, data = _held_out(policy, prompts)
    sampled = getattr(policy, "sampling", None) or SamplingHparams(max_new_tokens=64)
    max_prompt_length = max_prompt_length or (512 if data is None else data.max_length)
    records: Any = source.records("prompts", "validation")[:num_prompts]
    (batches,), asked = encode_questions(
        records,
        [mine.tokenizer],
        max_prompt_length=max_prompt_length,
        batch_size=batch_size,
        answers_per_prompt=answers_per_prompt,
    )
    if not asked:
        raise ValueError(
            f"no prompt of {prompts} is held out with at most {max_prompt_length} tokens: give a "
            "source with a validation part (validation_fraction=, validation_path=)"
        )
    longest = max_new_tokens or sampled.max_new_tokens
    if data is None:  # else it was said of the data that was trained on
        warn_of_plain_prompts(records, mine.tokenizer)
    if data is None or not hasattr(policy, "sampling"):
        warn_of_cut_responses(source, "validation", mine.tokenizer, longest, key="max_new_tokens")
    pad: Any = mine.tokenizer.pad_token_id
    sampling = Sampling(
        CachedGenerator(stop_ids(mine.tokenizer, mine.source), int(pad)),
        mine.tokenizer,
        temperature=sampled.temperature if temperature is None else temperature,
        max_new_tokens=longest,
        skip_special_tokens=sampled.skip_special_tokens,
    )
    questions = Questions(batches, answers_per_prompt=answers_per_prompt)
    findings = _asked(mine, theirs, questions, sampling, scorer, reward, seed=seed)
    rate, low, high = (findings.metrics[f"{WIN_RATE}{end}"] for end in ("", "_low", "_high"))
    return Comparison(rate, low, high, len(asked), findings.metrics, findings.samples)


def _held_out(policy: Any, prompts: Any) -> tuple[RecordSource, RecordDataModule | None]:
    """Return the source whose held-out part is asked, and the DataModule that it is of."""
    if isinstance(prompts, RecordDataModule):
        return prompts.source, prompts
    source = as_source(prompts, "prompts")
    data = getattr(getattr(policy, "_trainer", None), "datamodule", None)
    if source is prompts or not isinstance(data, RecordDataModule):
        return source, None
    both = (source, data.source)
    rows = [getattr(one, "rows", None) for one in both]
    labels = [getattr(one, "label", None) for one in both]
    same = rows[0] is rows[1] and labels[0] == labels[1] is not None
    return (data.source, data) if same else (source, None)


def _asked(
    mine: _Side,
    theirs: _Side,
    questions: Questions,
    sampling: Sampling,
    scorer: Scorer,
    reward: Any,
    *,
    seed: int,
) -> Findings:
    for model in scorer.build(None):
        model.to(mine.model.device)
    comparison = HeldOutComparison(
        questions, sampling, Judges(scored=True), seed=seed, scorer=scorer
    )
    with mine.precision:
        first = comparison.ask_policy(mine.model, theirs.model)
        second = comparison.ask_baseline(theirs.model)
    metrics = comparison.measure(first, second)
    if WIN_RATE not in metrics:
        raise ValueError(
            "no score: the reward has none (None) for the two responses to any of the prompts; "
            "compare by one that applies to them"
        )
    samples = side_by_side(first.main, second.main, len(first.main.prompts))
    findings = Findings(metrics, samples, values_of(first.main, second.main))
    by = str(reward) if isinstance(reward, str | Path) else scorer
    for callback in getattr(mine.trainer, "callbacks", ()):
        if hasattr(callback, "on_compare_end"):
            callback.on_compare_end(mine.trainer, findings, theirs.name, by)
    return findings


@dataclass(frozen=True)
class _Side:
    model: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    name: str
    trainer: Any
    precision: AbstractContextManager[Any]


@reads_one_model
def _load(source: str | Path) -> tuple[PolicyModel, PreTrainedTokenizerBase]:
    return frozen(load_policy(source)), load_tokenizer(source)


def _side(policy: Any, name: str) -> _Side:
    if isinstance(policy, str | Path):
        with naming_argument(name, policy):
            return _Side(*_load(policy), str(policy), str(policy), None, nullcontext())
    model = getattr(policy, "policy", None)
    if not isinstance(model, PolicyModel):
        raise TypeError(
            f"{name} is a {type(policy).__name__} that has no trained policy: give a PPOModule or "
            "SFTModule after fit or load_from_checkpoint, or the folder or hub name of a policy"
        )
    trainer = policy._trainer
    context = nullcontext()
    if trainer is not None:
        model = model.to(trainer.strategy.root_device)
        context = trainer.strategy.precision_plugin.forward_context()
    source = str(policy.hparams.get("policy") or policy.hparams.get("source"))
    name = f"{type(policy).__name__} trained from {source}"
    return _Side(model, policy.tokenizer, source, name, trainer, context)
