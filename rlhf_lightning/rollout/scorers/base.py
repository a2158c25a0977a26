"""Scorers: what a response is worth, one number a row."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import reprlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_lightning.arguments import CodeName, Count, Name, PathOrName, checked
from rlhf_lightning.batches import FINISHED_BY_STOP, Generation, PromptBatch
from rlhf_lightning.distributed.collectives import agreed_max, world_size
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.classifiers import max_positions
from rlhf_lightning.models.forward import ResponseRows, by_micro_batch, sequence_scores
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.rollout.scorers.functions import error_line, load_function
from rlhf_lightning.text.decode import response_texts
from rlhf_lightning.text.messages import CONVERSATION
from rlhf_lightning.text.reward_text import Completion
from rlhf_lightning.text.thoughts import Thoughts, shown
from rlhf_lightning.text.tokenizers import check_same_tokenizer, load_tokenizer

RewardFunction = Callable[..., Any]
OURS = ("prompts", "completions")
SCORE = "score"  # in a dict that a reward function returns
LARGEST = torch.finfo(torch.float32).max
SLOW_SECONDS = 30.0  # after which a call that still runs is named

logger = logging.getLogger(__name__)


class Scores(NamedTuple):
    """Scores of rows, NaN where a reward does not apply.

    Args:
        total: `[B]` score of each row.
        components: its named parts, each `[B]`.
        applies: `[B]` bool, False on rows without a score, which are not trained on; None where
            every row has one.
    """

    total: Tensor
    components: Mapping[str, Tensor]
    applies: Tensor | None = None


@dataclass(frozen=True)
class Responses:
    """Prompts with their generated responses, as ids and as text.

    Args:
        prompts: the prompts.
        generation: the responses.
        attention_mask: `[B, P + R]` bool.
        completions: responses as text, without the token that ended one.
    """

    prompts: PromptBatch
    generation: Generation
    attention_mask: Tensor
    completions: tuple[str, ...]

    @classmethod
    def of(
        cls,
        prompts: PromptBatch,
        generation: Generation,
        tokenizer: PreTrainedTokenizerBase,
        *,
        skip_special_tokens: bool = False,
    ) -> Self:
        """Return the responses with their text, without the token that ended one."""
        mask = generation.response_mask
        width = prompts.input_ids.shape[1]
        written = mask.sum(1) - (generation.finish_reason == FINISHED_BY_STOP).long()
        lengths = torch.stack([prompts.attention_mask.sum(1), written], 1)  # [B, 2]
        rows = list(zip(generation.sequences.tolist(), lengths.tolist(), strict=True))  # at once
        asked = [ids[width - prompt : width] for ids, (prompt, _) in rows]
        kept = [ids[width : width + response] for ids, (_, response) in rows]
        texts = response_texts(asked, kept, tokenizer, skip_special_tokens=skip_special_tokens)
        attention_mask = torch.cat([prompts.attention_mask, mask], 1)
        return cls(prompts, generation, attention_mask, tuple(texts))

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


def response_texts_of(responses: Responses, *, thoughts: Thoughts = "keep") -> list[Completion]:
    """Return the responses as texts, row by row, with their thoughts or without."""
    columns = responses.prompts.columns
    conversations = columns.get(CONVERSATION, ("",) * len(responses.prompts))
    ends = responses.finished.tolist()
    rows = zip(columns["prompt"], conversations, responses.completions, ends, strict=True)
    found = []
    for prompt, written, completion, finished in rows:
        told, variables = json.loads(written) if written else None, {}
        rendered = told is True  # of a plain prompt whose special tokens are tokens
        turns = None if rendered else told
        if turns and isinstance(turns[-1], list):
            variables, turns = turns
        text = shown(prompt, completion, thoughts, "scorer.thoughts")
        found.append(Completion(text.prompt, turns, text.response, finished, rendered, variables))
    return found


class Scorer(Protocol):
    """Scores responses.

    One with an attribute `normalized` that is True gives scores of mean 0 and standard deviation 1
    over samples of the SFT policy; `score_clip="auto"` then clips them. `words` of its class
    is what a model card calls it; `{function}` in it is that argument, `{number}` counts `sources`.
    One with an attribute `is_reward` that is False gives scores that mean nothing.
    `loads_no_model` of its class is True where that needs no memory; else `holds` says what
    `rlhf-plan` counts: "model" for frozen reward models, "adapter" for one on the policy's base.
    """

    def build(self, base: Any = None) -> list[nn.Module]:
        """Load what the scorer needs; return its frozen models, to be placed and sharded.

        Args:
            base: the base of the policy's adapters, for reward models that are adapters too.
        """

    def __call__(self, responses: Responses) -> Scores:
        """Return one score a row."""


class ModelFree:
    """A scorer without a model."""

    loads_no_model = True

    def build(self, base: Any = None) -> list[nn.Module]:
        """Return no models."""
        return []


class NoReward(ModelFree):
    """No reward: 0 for every response, where a teacher alone is learnt from."""

    is_reward = False
    words = "a teacher, without a reward"
    name = "none"

    def __call__(self, responses: Responses) -> Scores:
        """Return zeros."""
        return Scores(torch.zeros(len(responses.prompts), device=responses.sequences.device), {})


def reward_of(scorer: Scorer | None) -> Scorer | None:
    """Return a scorer if what it gives is a reward, else None."""
    return scorer if getattr(scorer, "is_reward", True) else None


def check_context(model: PreTrainedModel, attention_mask: Tensor) -> None:
    """Check that a frozen model has positions for the longest row of all ranks.

    Args:
        model: reward model or teacher.
        attention_mask: `[B, T]` bool of this rank's rows.

    Raises:
        ValueError: if it has not: with rotary positions it would go on, and be wrong.
    """
    width, limit = int(attention_mask.sum(1).max()), max_positions(model)
    if limit is not None and (width := agreed_max(width, attention_mask.device)) > limit:
        told = f"a row has {width} tokens, and {model.name_or_path or type(model).__name__} reads"
        raise ValueError(f"{told} {limit}: shorten prompts, or lower max_new_tokens")


class RewardModelScorer:
    """A reward model that shares the policy's tokenizer, read at each response's last token.

    Args:
        load: returns the reward model.
        micro_batch_size: rows in one forward.
        name: name of the component.
        policy, source: folders or hub names of the policy's and of the reward model's tokenizer;
            without both, they are not compared.

    Raises:
        ValueError: if the tokenizers differ.
    """

    holds = "model"
    words = "a reward model"

    @checked
    def __init__(
        self,
        load: Callable[[], ScalarHeadModel],
        *,
        micro_batch_size: Count | None = None,
        name: str = "reward_model",
        policy: PathOrName | None = None,
        source: PathOrName | None = None,
    ) -> None:
        if policy is not None and source is not None and str(policy) != str(source):
            fix = f"use scorer=text_reward_model scorer.source={source}, which reads text"
            check_same_tokenizer(load_tokenizer(policy), source, fix=fix)
        loaded = getattr(load, "keywords", {}).get("source", source)
        if source is not None and str(loaded) != str(source):
            raise ValueError(f"source={source} and load.source={loaded} differ: give one")
        self.load = load
        self.source = None if source is None else str(source)
        self.micro_batch_size = micro_batch_size
        self.name = name
        self.model: ScalarHeadModel | None = None

    @property
    def normalized(self) -> bool:
        """True by the reward stage; of a model of another framework known once it is built."""
        return self.model is None or self.model.normalized

    def build(self, base: Any = None) -> list[nn.Module]:
        """Load the reward model, frozen."""
        if self.model is None:
            self.model = self.load()
            place_on_ranks(self.model.eval().requires_grad_(False), frozen=True)
        return [self.model]

    @torch.no_grad()
    def __call__(self, responses: Responses) -> Scores:
        """Return the reward model's scores."""
        model = self.model
        if model is None:
            raise RuntimeError(f"{type(self).__name__}.build() was not called")
        ids, mask = responses.sequences, responses.attention_mask
        check_context(model.trunk, mask)
        (total,) = by_micro_batch(
            lambda rows: (sequence_scores(model, ids[rows], mask[rows]),),
            mask,
            self.micro_batch_size,
            agree=agreed_max,
            models=(model,) if world_size() == 1 else (),
        )
        return Scores(total, {self.name: total})


def in_background(function: Callable[..., Any], *given: Any) -> Future[Any]:
    """Call a function in a thread that holds up neither Ctrl-C nor the end of this process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*given))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _watch(what: str, done: threading.Event) -> None:
    """Name a call that takes `SLOW_SECONDS`, and again each time that this doubles."""
    wait = passed = SLOW_SECONDS
    while not done.wait(wait):
        logger.warning("%s is still running after %g seconds", what, passed)
        wait, passed = passed, 2 * passed


class FunctionScorer(ModelFree):
    """Any Python callable `(prompts, completions, **columns) -> one number a completion`.

    Prompts and completions are lists of texts, columns have the types of the data. All are passed
    by keyword: those that the function names, or all if it has `**columns`. It may be async. It may
    return None for a response to which it does not apply; the response is then not trained on. In
    place of the list it may return `{"score": the list, NAME: another one}`: the others are only
    logged, as `rollout/score/FUNCTION_NAME`. A call that takes 30 seconds is named, and again each
    time that this doubles.

    Args:
        function: the callable, or `path.py:name`, or a dotted name.
        name: name of the component.

    Raises:
        ValueError: if there is no such function, or it does not take `completions` by keyword.
    """

    words = "a reward function ({function})"

    @checked
    def __init__(self, function: RewardFunction | CodeName, *, name: str | None = None) -> None:
        self.function_name = function if isinstance(function, str) else None
        self.function: Any = load_function(function) if isinstance(function, str) else function
        named = getattr(self.function, "func", self.function)  # of functools.partial
        self.name = name or str(getattr(named, "__name__", type(named).__name__))
        self._what = f"reward function {Path(self.function_name or self.name).name}"
        parameters = inspect.signature(self.function).parameters.values()
        keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = {p.name for p in parameters if p.kind in keywords}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        any_only = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        if "completions" not in names and not (takes_any and any_only):
            told = f"{self._what} takes ({', '.join(map(str, parameters))})"
            fix = "write def NAME(prompts, completions, **columns)"
            raise ValueError(f"{told}, and arguments are passed by keyword: {fix}")
        self._names = None if takes_any else names
        self._returned: set[str] | None = None  # the keys, which every call and rank must return

    @torch.no_grad()
    def __call__(self, responses: Responses) -> Scores:
        """Return the function's numbers; NaN where it does not apply.

        Raises:
            RuntimeError: if it raises.
            ValueError: if it returns something else than a finite number or None for each
                completion, or a dict with other keys than before.
        """
        values = self._values(responses)
        given = {k: v for k, v in values.items() if self._names is None or k in self._names}
        done = threading.Event()
        threading.Thread(target=_watch, args=(self._what, done), daemon=True).start()
        try:
            returned = self.function(**given)
            if inspect.iscoroutine(returned):  # the loop of a notebook is in this thread
                returned = in_background(asyncio.run, returned).result()
        except (Exception, SystemExit) as error:
            shown = ", ".join(f"{name}[0]={values[name][0]!r:.200}" for name in OURS)
            raise RuntimeError(
                f"{self._what} raised {error_line(error)}; it was called with texts (no lists of "
                f"messages), {shown}, and the columns {sorted(values.keys() - set(OURS))}"
            ) from error
        finally:
            done.set()
        parts = dict(returned) if isinstance(returned, Mapping) else {SCORE: returned}
        if SCORE not in parts or self._returned not in (None, set(parts)):
            wanted = sorted(self._returned or {SCORE})
            told = f"{self._what} returned a dict with the keys {sorted(map(str, parts))}"
            raise ValueError(f"{told}: return {wanted}, the same in every call")
        self._returned = set(parts)
        found = {
            self.name if key == SCORE else f"{self.name}_{key}": torch.tensor(
                self._scores(value, responses.completions), dtype=torch.float32
            ).to(responses.sequences.device)
            for key, value in parts.items()
        }
        total = found[self.name]
        return Scores(total, found, ~total.isnan())

    def _scores(self, returned: Any, completions: Sequence[str]) -> list[float]:
        """Return one number a completion, NaN where the function returned None."""
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        is_list = isinstance(values, list | tuple)
        if not is_list or len(values) != len(completions):
            got = f"{len(values)} scores" if is_list else type(returned).__name__
            told = f"{self._what} returned {got} for {len(completions)} completions"
            raise ValueError(f"{told}: return a list with one number a completion")
        scores = []
        for row, value in enumerate(values):
            one = value.tolist() if hasattr(value, "tolist") else value  # of NumPy or torch
            if isinstance(one, list | tuple) and len(one) == 1:  # a row of [B, 1]
                (one,) = one
            if one is not None and not (isinstance(one, int | float) and abs(one) <= LARGEST):
                told = f"{self._what} returned {reprlib.repr(value)} for completion {row} "
                told += f"({completions[row][:200]!r})"
                raise ValueError(f"{told}: return a finite number, or None where it does not apply")
            scores.append(math.nan if one is None else float(one))
        return scores

    def _values(self, responses: Responses) -> dict[str, list[Any]]:
        """Return copies, which the function may change."""
        columns = responses.prompts.columns
        if both := columns.keys() & set(OURS):
            raise ValueError(f"{self._what}: the prompts have columns {sorted(both)}: rename them")
        shown = columns.keys() - {"prompt", CONVERSATION}
        values = {k: [deepcopy(value) for value in columns[k]] for k in columns if k in shown}
        values["prompts"] = list(columns["prompt"])
        values["completions"] = list(responses.completions)
        if any(responses.prompts.domains) or "domain" in (self._names or ()):
            values["domain"] = list(responses.prompts.domains)
        return values


class WeightedScorer:
    """A weighted sum of scorers, with optional weights by domain.

    Args:
        scorers: scorer by name.
        weights: weight by name; a missing name counts 1.
        domain_weights: domain -> name -> weight, in place of `weights` in that domain.

    Raises:
        ValueError: if a weight names no scorer.
    """

    loads_no_model = True
    words = "a weighted sum of rewards"

    @checked
    def __init__(
        self,
        scorers: Annotated[Mapping[Name, Scorer], Field(min_length=1)],
        *,
        weights: Mapping[str, float] | None = None,
        domain_weights: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self.scorers = dict(scorers)
        self.weights = dict(weights or {})
        self.domain_weights = {k: dict(v) for k, v in (domain_weights or {}).items()}
        every = [pair for w in (self.weights, *self.domain_weights.values()) for pair in w.items()]
        if unknown := sorted({name for name, _ in every} - self.scorers.keys()):
            raise ValueError(f"weights of {unknown}, but the scorers are {sorted(self.scorers)}")
        self._has_large_weight = any(abs(weight) > 1 for _, weight in every)

    @property
    def normalized(self) -> bool:
        """True if all of them are and none has a weight above 1; known once they are built."""
        parts = self.scorers.values()
        return not self._has_large_weight and all(getattr(s, "normalized", False) for s in parts)

    def build(self, base: Any = None) -> list[nn.Module]:
        """Build every scorer; return all their models."""
        return [model for scorer in self.scorers.values() for model in scorer.build(base)]

    def __call__(self, responses: Responses) -> Scores:
        """Return the weighted sum of what applies to a row; components are the unweighted parts."""
        rows, device = len(responses.prompts), responses.sequences.device
        total = torch.zeros(rows, device=device)
        applied = torch.zeros(rows, dtype=torch.bool, device=device)  # a part, with a weight
        lacking = applied
        components: dict[str, Tensor] = {}
        of_domains = [self.domain_weights.get(each, {}) for each in responses.prompts.domains]
        for name, scorer in self.scorers.items():
            part = scorer(responses)
            components[name] = part.total
            more = {k: v for k, v in part.components.items() if v is not part.total}
            components |= {k if k.startswith(name) else f"{name}_{k}": v for k, v in more.items()}
            usual = self.weights.get(name, 1.0)
            weights = torch.tensor([own.get(name, usual) for own in of_domains], device=device)
            weighted, applies = part.total * weights, part.applies
            if applies is not None:
                weighted, lacking = weighted.where(applies, 0), lacking | ~applies
            total = total + weighted
            applied = applied | ((weights != 0) if applies is None else applies & (weights != 0))
        scored = applied | ~lacking
        return Scores(total.where(scored, torch.nan), components, scored)
