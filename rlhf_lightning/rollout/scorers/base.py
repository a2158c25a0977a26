"""Scorers: what a response is worth, one number a row."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsFloat

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import CONVERSATION, FINISHED_BY_STOP, Generation, PromptBatch
from rlhf_lightning.distributed.collectives import agreed_max, world_size
from rlhf_lightning.models.building import completed
from rlhf_lightning.models.cpu_kernels import side_by_side
from rlhf_lightning.models.forward import ResponseRows, by_micro_batch, sequence_scores
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.text.decoding import response_texts
from rlhf_lightning.text.reward_texts import AnswerText
from rlhf_lightning.text.tokenizers import check_same_tokenizer, load_tokenizer

RewardFunction = Callable[..., Sequence[float]]


class Scores(NamedTuple):
    """Total score of each row `[B]` and its named parts, each `[B]`."""

    total: Tensor
    components: Mapping[str, Tensor]


@dataclass(frozen=True)
class Answers:
    """Prompts with their generated responses, as ids and as text.

    Args:
        prompts: the prompts.
        generation: the responses.
        attention_mask: `[B, P + R]` bool.
        completions: responses as text, without special tokens.
    """

    prompts: PromptBatch
    generation: Generation
    attention_mask: Tensor
    completions: tuple[str, ...]

    @property
    def sequences(self) -> Tensor:
        """`[B, P + R]` ids."""
        return self.generation.sequences

    @property
    def response_mask(self) -> Tensor:
        """`[B, R]` bool."""
        return self.generation.response_mask

    @property
    def finished(self) -> Tensor:
        """`[B]` bool, True where the response ended by itself."""
        return self.generation.finish_reason == FINISHED_BY_STOP

    def rows(self, index: Tensor) -> ResponseRows:
        """Return these rows as the models read them."""
        return ResponseRows(
            self.sequences[index], self.attention_mask[index], self.response_mask[index]
        )


def make_answers(
    prompts: PromptBatch, generation: Generation, tokenizer: PreTrainedTokenizerBase
) -> Answers:
    """Return the answers with their text, without the token that ended one."""
    mask = generation.response_mask
    responses = generation.sequences[:, -mask.shape[1] :].cpu()
    lengths = mask.sum(1) - (generation.finish_reason == FINISHED_BY_STOP).long()  # [B]
    kept = [ids[:n].tolist() for ids, n in zip(responses, lengths.tolist(), strict=True)]
    texts = response_texts(kept, tokenizer)
    attention_mask = torch.cat([prompts.attention_mask, mask], 1)
    return Answers(prompts, generation, attention_mask, tuple(texts))


def answer_texts(answers: Answers) -> list[AnswerText]:
    """Return the answers as texts, row by row."""
    columns = answers.prompts.columns
    conversations = columns.get(CONVERSATION, ("",) * len(answers.prompts))
    rows = zip(
        columns["prompt"],
        conversations,
        answers.completions,
        answers.finished.tolist(),
        strict=True,
    )
    return [
        AnswerText(prompt, json.loads(messages) if messages else None, completion, finished)
        for prompt, messages, completion, finished in rows
    ]


class Scorer(Protocol):
    """Scores answers."""

    def build(self, base: Any = None) -> list[nn.Module]:
        """Load what the scorer needs; return its frozen models, to be placed and sharded.

        Args:
            base: what the policy's adapters stand on, for reward models that are adapters too.
        """

    def __call__(self, answers: Answers) -> Scores:
        """Return one score a row."""


class RewardModelScorer:
    """A reward model that shares the policy's tokenizer, read at each response's last token.

    Args:
        load: returns the reward model.
        micro_batch_size: rows in one forward.
        name: of the component.
        policy, source: folders or hub names of the policy's and of the reward model's tokenizer;
            without both, they are not compared.

    Raises:
        ValueError: if the tokenizers differ.
    """

    def __init__(
        self,
        load: Callable[[], ScalarHeadModel],
        *,
        micro_batch_size: int | None = None,
        name: str = "reward_model",
        policy: str | Path | None = None,
        source: str | Path | None = None,
    ) -> None:
        if policy is not None and source is not None and str(policy) != str(source):
            fix = f"use scorer=text_reward_model scorer.source={source}, which reads text"
            check_same_tokenizer(load_tokenizer(policy), source, fix=fix)
        self.load = load
        self.micro_batch_size = micro_batch_size
        self.name = name
        self.model: ScalarHeadModel | None = None

    def build(self, base: Any = None) -> list[nn.Module]:
        """Load the reward model, frozen."""
        if self.model is None:
            self.model = self.load()
            completed(self.model.eval().requires_grad_(False), frozen=True)
        return [self.model]

    @torch.no_grad()
    def __call__(self, answers: Answers) -> Scores:
        """Return the reward model's scores."""
        model = self.model
        if model is None:
            raise RuntimeError("RewardModelScorer.build() was not called")
        ids, mask = answers.sequences, answers.attention_mask
        beside = side_by_side(model) if world_size() == 1 else None
        (total,) = by_micro_batch(
            lambda rows: (sequence_scores(model, ids[rows], mask[rows]),),
            mask,
            self.micro_batch_size,
            agree=agreed_max,
            run=None if beside is None else beside.run,
        )
        return Scores(total, {self.name: total})


class FunctionScorer:
    """Any Python callable `(prompts, completions, **columns) -> list[float]`.

    Args:
        function: the callable, or `path.py:name`, or a dotted name.
        name: of the component.
    """

    def __init__(self, function: RewardFunction | str, *, name: str | None = None) -> None:
        self.function = load_function(function) if isinstance(function, str) else function
        self.name = name or str(getattr(self.function, "__name__", "function"))

    def build(self, base: Any = None) -> list[nn.Module]:
        """Return no models."""
        return []

    def __call__(self, answers: Answers) -> Scores:
        """Return the function's numbers.

        Raises:
            RuntimeError: if it raises; the error names the function and the columns it was given.
            ValueError: if it returns a mapping, the wrong count, or something that is not a finite
                number.
        """
        hidden = ("prompt", CONVERSATION)
        # Copies, which the function may change.
        columns = {k: list(v) for k, v in answers.prompts.columns.items() if k not in hidden}
        if any(answers.prompts.domains) and _takes(self.function, "domain"):
            columns["domain"] = list(answers.prompts.domains)
        prompts = list(answers.prompts.columns["prompt"])
        names = sorted(columns)
        try:
            returned = self.function(prompts, list(answers.completions), **columns)
            values = list(returned)
        except (Exception, SystemExit) as error:
            raise RuntimeError(
                f"reward function {self.name} raised {type(error).__name__}: {error}; it was "
                f"called with prompts, completions and the columns {names}"
            ) from error
        count = len(answers.completions)
        if isinstance(returned, Mapping):
            raise ValueError(
                f"reward function {self.name} returned {type(returned).__name__} with the keys "
                f"{values[:4]}, which are no scores: return a list with one number a completion"
            )
        if len(values) != count:
            raise ValueError(
                f"reward function {self.name} returned {len(values)} scores for {count} "
                "completions: return one number a completion"
            )
        for row, value in enumerate(values):
            if not _is_finite_number(value):
                raise ValueError(
                    f"reward function {self.name} returned {value!r} for completion {row} "
                    f"({answers.completions[row]!r}): return a finite number"
                )
        device = answers.sequences.device
        total = torch.tensor([float(value) for value in values], device=device)
        return Scores(total, {self.name: total})


class WeightedScorer:
    """A weighted sum of scorers, with optional weights by domain.

    Args:
        scorers: by name.
        weights: by name; a missing name counts 1.
        domain_weights: domain -> name -> weight, in place of `weights` in that domain.

    Raises:
        ValueError: if a weight names no scorer.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        *,
        weights: Mapping[str, float] | None = None,
        domain_weights: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self.scorers = dict(scorers)
        self.weights = dict(weights or {})
        self.domain_weights = {k: dict(v) for k, v in (domain_weights or {}).items()}
        for where in (self.weights, *self.domain_weights.values()):
            for name in where:
                if name not in self.scorers:
                    raise ValueError(
                        f"weight for {name!r}, but the scorers are {sorted(self.scorers)}"
                    )

    def build(self, base: Any = None) -> list[nn.Module]:
        """Build every scorer; return all their models."""
        return [model for scorer in self.scorers.values() for model in scorer.build(base)]

    def __call__(self, answers: Answers) -> Scores:
        """Return the weighted sum; components are the unweighted parts."""
        total = torch.zeros(len(answers.prompts), device=answers.sequences.device)
        components: dict[str, Tensor] = {}
        for name, scorer in self.scorers.items():
            components[name] = scorer(answers).total
            weights = [
                self.domain_weights.get(domain, {}).get(name, self.weights.get(name, 1.0))
                for domain in answers.prompts.domains
            ]
            total = total + components[name] * torch.tensor(weights, device=total.device)
        return Scores(total, components)


def _takes(function: RewardFunction, name: str) -> bool:
    """Return whether a function has an argument of that name, or takes all columns."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-in functions have none
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _is_finite_number(value: object) -> bool:
    # NumPy's and torch's scalars count too.
    return isinstance(value, SupportsFloat) and math.isfinite(value)


def load_function(path: str) -> RewardFunction:
    """Return the callable that `path.py:name` or `package.module.name` names.

    Raises:
        ValueError: if there is no such file, module or callable.
    """
    file, colon, name = path.rpartition(":")
    try:
        if colon:
            module: Any = _load_file(Path(file))
        else:
            module_name, _, name = path.rpartition(".")
            module = importlib.import_module(module_name)
    except (ImportError, FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"reward function {path!r}: {error}; give 'path.py:name' or 'package.module.name'"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward function {path!r}: {name!r} is no callable there")
    return function  # type: ignore[no-any-return]


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    spec = importlib.util.spec_from_file_location(f"reward_function_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ImportError(f"{type(error).__name__} while it was read: {error}") from error
    return module
