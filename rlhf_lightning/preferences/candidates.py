"""Candidates: several responses to each prompt, from several policies and ways to decode.

The work is cut into units, a policy, a way to decode and some prompts each. A unit is one line of a
journal, written when it is done: a killed run does the rest, and the responses do not depend on
when it was killed or on the batch size.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import Count, CountOrZero, ShareAbove0, Temperature
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.collate import PromptCollator
from rlhf_lightning.data.encode import EncodedPrompt, encode_prompt
from rlhf_lightning.data.progress import with_bar
from rlhf_lightning.data.records import PromptRecord, as_columns, text_key
from rlhf_lightning.hparams import Checked, Usual
from rlhf_lightning.models.classifiers import prompt_room
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.precision import round_frozen_weights
from rlhf_lightning.preferences.records import Candidate, Journal, write_records
from rlhf_lightning.rollout.generators.captured import CapturedGenerator
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import Responses
from rlhf_lightning.text.messages import as_text
from rlhf_lightning.text.thoughts import marks_thoughts
from rlhf_lightning.text.tokenizers import load_tokenizer, stop_ids
from rlhf_lightning.text.tokens import ControlTokens, TextEncoder

# Why a candidate was dropped: its metric, and what to change.
EMPTY = "empty"
UNFINISHED = "cut off at max_new_tokens"
DUPLICATE = "said before"
OVER_LONG = "prompt over-long"
METRICS = {
    UNFINISHED: "collect/dropped_cut_off",
    EMPTY: "collect/dropped_empty",
    DUPLICATE: "collect/dropped_said_before",
    OVER_LONG: "collect/dropped_prompt_over_long",
}
ADVICE = (
    "try more candidates.num_samples or prompts, a larger candidates.max_new_tokens (or "
    "lab.keep_unfinished=true), candidates.decoding.temperature or candidates.max_prompt_length"
)


@dataclass(frozen=True)
class Decoding(Checked):
    """One way to decode.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: keep the likeliest tokens that together have at least this probability.
        top_k: keep at most this many tokens; 0 keeps all.
    """

    temperature: Annotated[Temperature, Usual(0.3, 1.3)] = 1.0
    top_p: ShareAbove0 = 1.0
    top_k: CountOrZero = 0

    @property
    def settings(self) -> dict[str, float]:
        """The settings as candidates keep them; top-k only where there is one."""
        return {key: value for key, value in asdict(self).items() if key != "top_k" or value}


def grid(settings: Mapping[str, Sequence[float]]) -> list[Decoding]:
    """Return every combination of the values, in the order in which they are written.

    Args:
        settings: names of `Decoding` and lists of values.

    Raises:
        ValueError: for an unknown name, an empty list or a value that cannot be.
    """
    known = list(Decoding.__dataclass_fields__)
    for name, values in settings.items():
        if name not in known or not isinstance(values, list | tuple) or not values:
            raise ValueError(f"decoding.{name}={values!r}: give lists, [0.7, 1.0], of {known}")
    rows = product(*settings.values())
    return [Decoding(**dict(zip(settings, row, strict=True))) for row in rows]  # type: ignore[arg-type]


class TruncatedGenerator(CapturedGenerator):
    """The rollouts' engine with top-k and top-p: for candidates only.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        decoding: what to keep; its temperature is that of the call.
    """

    def __init__(self, stop_ids: Sequence[int], pad_token_id: int, *, decoding: Decoding) -> None:
        super().__init__(stop_ids, pad_token_id)
        self.decoding = decoding

    def _sampling(self, temperature: float) -> tuple[Any, ...]:
        return (temperature, self.decoding)

    def _truncated(self, logits: Tensor, temperature: float) -> Tensor:
        return truncate(
            logits, temperature=temperature, top_k=self.decoding.top_k, top_p=self.decoding.top_p
        )


def truncate(logits: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return logits that are -inf outside the top-k and top-p sets, top-k first.

    The top-p set is the smallest of the likeliest tokens whose probability is at least `top_p`;
    tokens as likely as its last one belong to it too.

    Args:
        logits: `[A, V]` raw logits.
        temperature: temperature of the probabilities.
        top_k: 0 for no limit.
        top_p: 1 for no limit.

    Source: Holtzman et al. 2020, "The curious case of neural text degeneration".
    """
    if temperature == 0:
        return logits
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1:
        ordered = logits.sort(dim=-1, descending=True).values  # [A, V]
        probabilities = torch.softmax(ordered.float() / temperature, dim=-1).double()
        before = probabilities.cumsum(-1) - probabilities
        last = (before < top_p).sum(-1, keepdim=True) - 1  # the first token is always kept
        logits = logits.masked_fill(logits < ordered.gather(-1, last), float("-inf"))
    return logits


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy that is ready to sample."""

    model: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: Sequence[int]

    @cached_property
    def generator(self) -> TruncatedGenerator:
        """The engine that samples from it; `decoding` may be set before each call."""
        pad = int(self.tokenizer.pad_token_id)  # type: ignore[arg-type]
        return TruncatedGenerator(self.stop_ids, pad, decoding=Decoding())


def load_candidate_policy(
    source: str, *, revision: str | None, trust_remote_code: bool, precision: str, **template: Any
) -> LoadedPolicy:
    """Return a frozen policy with its tokenizer and stop ids, on the GPU if there is one.

    Under `bf16-mixed` its matrices are held in bf16, and it computes in it. `template` are the
    `chat_template` and `chat_template_arguments` of `load_tokenizer`.
    """
    origin: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None and not Path(source).is_dir():
        origin["revision"] = revision
    tokenizer = load_tokenizer(source, **template, **origin)
    policy = frozen(load_policy(source, **origin))
    round_frozen_weights(policy.model, precision)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    return LoadedPolicy(policy, tokenizer, stop_ids(tokenizer, source, revision=revision))


@dataclass(frozen=True)
class Sampling(Checked):
    """Settings of the sampling of candidates.

    Args:
        policies: name -> loader of the policy; loaded one after the other.
        decodings: ways to decode; each policy responds to each prompt in each of them.
        num_samples: responses of a policy to a prompt with one way to decode.
        max_new_tokens: longest response, in tokens.
        max_prompt_length: tokens; longer prompts are left out, as are those to which a response of
            `max_new_tokens` is beyond what a policy reads.
        batch_size: prompts of a unit.
        seed: seeds the sampling noise.
        skip_special_tokens: leave special tokens out of the responses.
    """

    policies: Annotated[Mapping[str, Callable[[], LoadedPolicy]], Field(min_length=1)]
    decodings: Annotated[Sequence[Decoding], Field(min_length=1)]
    num_samples: Count
    max_new_tokens: Count
    max_prompt_length: Count
    batch_size: Count
    seed: int
    skip_special_tokens: bool = False

    @property
    def per_prompt(self) -> int:
        """Number of responses to one prompt."""
        return len(self.policies) * len(self.decodings) * self.num_samples


class Unit(NamedTuple):
    """A piece of work: prompts `start` to `stop` for one policy and one way to decode."""

    policy: int
    decoding: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The same in every run of one plan."""
        return f"{self.policy}/{self.decoding}/{self.start}-{self.stop}"


def units(sampling: Sampling, num_prompts: int) -> list[Unit]:
    """Return all units, policy after policy, so that each is loaded once."""
    size, counts = sampling.batch_size, (len(sampling.policies), len(sampling.decodings))
    starts = range(0, num_prompts, size)
    parts = product(*map(range, counts), starts)
    return [Unit(p, d, start, min(start + size, num_prompts)) for p, d, start in parts]


def sample_candidates(
    prompts: Sequence[PromptRecord], sampling: Sampling, journal: Journal[dict[str, Any]]
) -> list[Candidate]:
    """Return every response, by policy, way to decode and prompt; do only units not yet done.

    The journal has of each unit its name, the plan, and (prompt number, text, ended by itself).

    Raises:
        ValueError: if the journal is that of other prompts or settings, or a rendered prompt spells
            special tokens.
    """
    plan = _plan(prompts, sampling)
    done = {row["unit"]: row for row in journal.read()}
    if any(row["plan"] != plan for row in done.values()):
        raise ValueError(f"{journal.path} is of other prompts or settings: start a new run")
    todo = units(sampling, len(prompts))
    missing = [unit for unit in todo if unit.name not in done]
    for number, own in groupby(missing, key=lambda unit: unit.policy):
        policy = list(sampling.policies.values())[number]()
        encoded = _encode(prompts, policy, sampling)
        for unit in with_bar([*own], "candidates", "batches"):
            answers = _answer(unit, policy, encoded, sampling)
            done[unit.name] = {"unit": unit.name, "plan": plan, "answers": answers}
            journal.append([done[unit.name]])
        del policy
    found = (_candidates(unit, done[unit.name]["answers"], prompts, sampling) for unit in todo)
    return [candidate for candidates in found for candidate in candidates]


def collect_candidates(
    prompts: Sequence[PromptRecord], sampling: Sampling, folder: Path, *, keep_unfinished: bool
) -> tuple[list[Candidate], int, dict[str, int], str]:
    """Sample candidates with a journal in `folder`, and write `candidates.jsonl`.

    Returns:
        Those that can be compared, the number that was asked for, the dropped ones by reason, and
        both numbers in a line.
    """
    journal: Journal[dict[str, Any]] = Journal(folder / "candidates.journal.jsonl", dict)
    sampled = sample_candidates(prompts, sampling, journal)
    kept, dropped = usable(sampled, keep_unfinished=keep_unfinished)
    num_asked = sampling.per_prompt * len(prompts)
    if len(sampled) < num_asked:
        dropped[OVER_LONG] = num_asked - len(sampled)
    write_records(folder / "candidates.jsonl", kept)
    why = ", ".join(f"{number} {reason}" for reason, number in dropped.items())
    told = f"{len(kept)} of {num_asked} candidates can be compared"
    return kept, num_asked, dropped, f"{told} (dropped: {why})" if why else told


def usable(
    candidates: Sequence[Candidate], *, keep_unfinished: bool = False
) -> tuple[list[Candidate], dict[str, int]]:
    """Return the candidates that can be compared, and how many were dropped for which reason.

    It drops empty ones, those cut off at the token limit (a cut text would pass for a finished
    one), and all but the first of equal responses to a prompt, ignoring space and case.
    """
    kept: list[Candidate] = []
    dropped: Counter[str] = Counter()
    said: set[tuple[str, str]] = set()
    for candidate in candidates:
        text = " ".join(candidate.response.lower().split())
        if not text:
            dropped[EMPTY] += 1
        elif candidate.finished is False and not keep_unfinished:
            dropped[UNFINISHED] += 1
        elif (candidate.prompt_id, text) in said:
            dropped[DUPLICATE] += 1
        else:
            said.add((candidate.prompt_id, text))
            kept.append(candidate)
    return kept, dict(dropped)


def _plan(prompts: Sequence[PromptRecord], sampling: Sampling) -> str:
    """Return a hash of everything that the responses depend on, except the weights."""
    parts = [text_key(prompt.prompt) for prompt in prompts]
    parts += [as_text(dict(prompt.variables)) for prompt in prompts if prompt.variables]
    parts += [*sampling.policies, *map(repr, sampling.decodings)]
    parts += ["skip_special_tokens"] * sampling.skip_special_tokens
    numbers = (sampling.num_samples, sampling.max_new_tokens, sampling.max_prompt_length)
    text = "\0".join((*parts, repr((numbers, sampling.batch_size, sampling.seed))))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _encode(
    prompts: Sequence[PromptRecord], policy: LoadedPolicy, sampling: Sampling
) -> list[EncodedPrompt | None]:
    """Return the rows of the prompts, None for those that leave no room for a response."""
    control = ControlTokens(policy.tokenizer)
    for number, prompt in enumerate(prompts, start=1):
        if prompt.rendered and control.spelled_in(prompt.prompt):
            raise ValueError(f"prompt {number} is rendered and spells special tokens: give turns")
    encoder = TextEncoder(policy.tokenizer)
    longest = prompt_room(policy.model, sampling.max_prompt_length, sampling.max_new_tokens)
    return [encode_prompt(prompt, encoder, max_length=longest) for prompt in prompts]


def _answer(
    unit: Unit, policy: LoadedPolicy, encoded: Sequence[EncodedPrompt | None], sampling: Sampling
) -> tuple[tuple[int, str, bool], ...]:
    """Return the responses of one unit; over-long prompts have none."""
    count, asked = sampling.num_samples, enumerate(encoded[unit.start : unit.stop], unit.start)
    whole = ((number, row) for number, row in asked if row is not None)
    rows = [(row, number * count + sample) for number, row in whole for sample in range(count)]
    if not rows:
        return ()
    generator = policy.generator
    generator.decoding = decoding = sampling.decodings[unit.decoding]
    place = unit.policy * len(sampling.decodings) + unit.decoding
    batch: PromptBatch = PromptCollator(generator.pad_token_id)(rows).to(policy.model.device)
    noise, longest = RowNoise(sampling.seed, "candidates", place), sampling.max_new_tokens
    how: dict[str, Any] = {"temperature": decoding.temperature, "max_new_tokens": longest}
    with torch.no_grad(), policy.model.generating() as model:
        generation = generator(model, batch, noise=noise, **how)
    skip = sampling.skip_special_tokens
    answers = Responses.of(batch, generation, policy.tokenizer, skip_special_tokens=skip)
    numbers = [row_id // count for _, row_id in rows]
    # Records that spell control tokens are refused; by their marks thoughts are known.
    texts = ControlTokens(policy.tokenizer, but=marks_thoughts).disarmed(answers.completions)
    return tuple(zip(numbers, texts, answers.finished.tolist(), strict=True))


def _candidates(
    unit: Unit, answers: Sequence[Any], prompts: Sequence[PromptRecord], sampling: Sampling
) -> Iterator[Candidate]:
    model, way = list(sampling.policies)[unit.policy], sampling.decodings[unit.decoding]
    same: dict[str, Any] = {"model": model, "settings": way.settings, "seed": sampling.seed}
    for number, text, end in answers:
        asked = prompts[number]
        given = {**asked.columns, **as_columns(asked.variables)}
        columns = {name: as_text(value) for name, value in given.items()}
        yield Candidate.make(
            asked.prompt, text, domain=asked.domain, finished=end, columns=columns, **same
        )
