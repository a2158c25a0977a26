"""Frozen batches that pass between the parts, checked once when they are made.

Legend: B rows, P padded prompt tokens, R padded response tokens, T padded tokens of a sequence.
Every tensor `[B, R]` is about response token t given everything before it. Masks are bool and
True = counts. Prompts are padded on the left, everything else on the right. `domains` hold
one text a row, `columns` one value of any type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Self

import torch
from torch import Tensor

FINISHED_BY_STOP = 0
FINISHED_BY_LENGTH = 1


@dataclass(frozen=True)
class TensorBatch:
    """Rows held in tensors, and in tuples for what is not a tensor.

    A field is a tensor whose first dimension is the rows, a tuple with one entry a row, a mapping
    from names to either, or an `int` shared by all rows.
    """

    def __len__(self) -> int:
        """Return the number of rows."""
        for value in vars(self).values():
            if isinstance(value, Tensor):
                return value.shape[0]
        raise TypeError(f"{type(self).__name__} holds no tensor, so it has no rows")

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Self:
        """Return the batch of these rows, in this order."""
        index = torch.arange(len(self))[rows] if isinstance(rows, slice) else torch.as_tensor(rows)
        index = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
        return replace(self, **{key: _take(value, index) for key, value in vars(self).items()})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch on `device`; Lightning calls this to move a batch."""
        non_blocking |= torch.device(device).type != "cpu"  # the host need not wait for the copy
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory; the DataLoader calls this."""
        return self._map(Tensor.pin_memory)

    def detach(self) -> Self:
        """Return the batch without autograd graphs."""
        return self._map(Tensor.detach)

    @classmethod
    def cat(cls, batches: Sequence[Self]) -> Self:
        """Return one batch with the rows of all `batches`, which must agree in every width."""
        if not batches:
            raise ValueError("cat needs at least one batch, got none")
        joined = {key: _join([vars(batch)[key] for batch in batches]) for key in vars(batches[0])}
        return replace(batches[0], **joined)

    def _map(self, function: Any) -> Self:
        return replace(self, **{key: _apply(item, function) for key, item in vars(self).items()})

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, wanted in shapes.items():
            got = list(getattr(self, name).shape)
            if got != list(wanted):
                key = f"{type(self).__name__}.{name}"
                raise ValueError(f"{key} has shape {got}, expected {list(wanted)}")

    def _check_mask(self, *names: str) -> None:
        for name in names:
            dtype = getattr(self, name).dtype
            if dtype != torch.bool:
                key = f"{type(self).__name__}.{name}"
                raise TypeError(f"{key} has dtype {dtype}, expected torch.bool (True = counts)")


def _apply(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _apply(item, function) for key, item in value.items()}
    return value


def _take(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[index.to(value.device, non_blocking=True)]
    if isinstance(value, tuple):
        return tuple(value[i] for i in index.tolist())
    if isinstance(value, Mapping):
        return {key: _take(item, index) for key, item in value.items()}
    return value


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, tuple):
        return tuple(item for value in values for item in value)
    if isinstance(first, Mapping):
        return {key: _join([value[key] for value in values]) for key in first}
    if any(value != first for value in values):
        raise ValueError(f"cannot join batches that differ in a shared value: {list(values)}")
    return first


@dataclass(frozen=True)
class PromptBatch(TensorBatch):
    """Prompts of one iteration.

    Args:
        input_ids: `[B, P]`, padded on the left.
        attention_mask: `[B, P]` bool, True on prompt tokens.
        row_ids: `[B]` int64, the global index of the row in the stream of prompts, times the
            responses a prompt gets, plus the number of the response; sampling noise is a function
            of it.
        domains: "" where there is none.
        columns: values for scorers in their own types, None where a row lacks one: at least the
            text `prompt`, of conversations `prompt_messages` too.
        group_ids: `[B]` int64, equal for the rows of one prompt, which are adjacent; by default
            every row is a group.
        spare: `[B]` bool, True on the rows of prompts that are only asked where another prompt of
            the batch teaches nothing; by default there are none.
    """

    input_ids: Tensor
    attention_mask: Tensor
    row_ids: Tensor
    domains: tuple[str, ...]
    columns: Mapping[str, tuple[Any, ...]]
    group_ids: Tensor = None  # type: ignore[assignment]
    spare: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        if self.group_ids is None:
            object.__setattr__(self, "group_ids", self.row_ids)
        if self.spare is None:
            object.__setattr__(self, "spare", torch.zeros_like(self.row_ids, dtype=torch.bool))
        rows = self.input_ids.shape[0]
        per_row = dict.fromkeys(("row_ids", "group_ids", "spare"), (rows,))
        self._check({"attention_mask": tuple(self.input_ids.shape)} | per_row)
        self._check_mask("attention_mask", "spare")

    def with_row_ids(self, row_ids: Tensor) -> Self:
        """Return the rows that have these ids, `[b]`, in this order."""
        return self[(row_ids.unsqueeze(1) == self.row_ids).int().argmax(1)]


@dataclass(frozen=True)
class SFTBatch(TensorBatch):
    """Sequences to learn from.

    Args:
        input_ids: `[B, T]`, padded on the right.
        attention_mask: `[B, T]` bool, True on real tokens.
        loss_mask: `[B, T]` bool, True on the tokens that are learnt (response and its EOS).
        domains: "" where there is none.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    domains: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        shape = tuple(self.input_ids.shape)
        self._check({"attention_mask": shape, "loss_mask": shape})
        self._check_mask("attention_mask", "loss_mask")


@dataclass(frozen=True)
class PreferenceBatch(TensorBatch):
    """Pairs of a preferred and a rejected response, each with its prompt, EOS included.

    Args:
        chosen_input_ids, rejected_input_ids: `[B, T]`, padded on the right to one width.
        chosen_attention_mask, rejected_attention_mask: `[B, T]` bool, True on real tokens.
        chosen_length, rejected_length: `[B]` int64, response tokens including EOS.
        margin: `[B]` float, 0 where the data has none.
        domains: "" where there is none.
        row_ids: `[B]` int64, the index of the row among those of its split.
        answer_ids: a number of the chosen and one of the rejected response; equal numbers are the
            same response to the same prompt. None: not known.
        label: `[B]` bool of unpaired rows, whose response is on the chosen side: True where it is
            desirable. The other side has a response to another prompt. None: pairs.
    """

    chosen_input_ids: Tensor
    chosen_attention_mask: Tensor
    rejected_input_ids: Tensor
    rejected_attention_mask: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    margin: Tensor
    domains: tuple[str, ...]
    row_ids: Tensor
    answer_ids: tuple[tuple[int, int], ...] | None = None
    label: Tensor | None = None

    @property
    def prompt_keys(self) -> list[bytes]:
        """A hash of each row's prompt, the same on every rank."""
        lengths = self.chosen_attention_mask.sum(-1) - self.chosen_length
        rows = zip(self.chosen_input_ids.cpu().numpy(), lengths.tolist(), strict=True)
        return [blake2b(ids[:length].tobytes(), digest_size=16).digest() for ids, length in rows]

    @property
    def either_attention_mask(self) -> Tensor:
        """`[B, T]` bool, True up to the end of a pair's longer side."""
        return self.chosen_attention_mask | self.rejected_attention_mask

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        shape = tuple(self.chosen_input_ids.shape)
        per_token = ("chosen_attention_mask", "rejected_input_ids", "rejected_attention_mask")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(per_token, shape)
        per_row = ("chosen_length", "rejected_length", "margin", "row_ids")
        self._check(shapes | dict.fromkeys(per_row, shape[:1]))
        self._check_mask("chosen_attention_mask", "rejected_attention_mask")


@dataclass(frozen=True)
class Generation(TensorBatch):
    """The output of a generator: sequences of prompt and response.

    Args:
        sequences: `[B, P + R]` token ids.
        response_mask: `[B, R]` bool, True up to and including the first stop token.
        finish_reason: `[B]` int64, `FINISHED_BY_STOP` or `FINISHED_BY_LENGTH`.
        logprobs: `[B, R]` of each token under the distribution that it was drawn from, nats; None
            where the generator does not give them.
    """

    sequences: Tensor
    response_mask: Tensor
    finish_reason: Tensor
    logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        rows, response = self.response_mask.shape
        if self.sequences.shape[0] != rows or self.sequences.shape[1] < response:
            raise ValueError(
                f"Generation.sequences has shape {list(self.sequences.shape)}, expected "
                f"[{rows}, at least {response}]"
            )
        self._check({"finish_reason": (rows,)})
        if self.logprobs is not None:
            self._check({"logprobs": (rows, response)})
        self._check_mask("response_mask")


@dataclass(frozen=True)
class RolloutBatch(TensorBatch):
    """One iteration's experience: everything the updates need, and nothing with a graph.

    Args:
        sequences: `[B, P + R]` token ids.
        attention_mask: `[B, P + R]` bool, True on real prompt and response tokens.
        response_mask: `[B, R]` bool, True on actions (EOS included).
        logprobs: `[B, R]` old log-probabilities of the training module, nats.
        ref_logprobs: `[B, R]` the reference's.
        values: `[B, R]` old values of the state before token t; None without a value model.
        scores: `[B]` scores of the scorer, unshaped; NaN where it does not apply.
        rewards: `[B, R]` shaped token rewards: score at the last token minus the KL penalty.
        advantages: `[B, R]` that the policy learns from; PPO's are whitened over all ranks.
        returns: `[B, R]` targets of the value model; None without one.
        entropy: `[B, R]` of the policy at sampling, nats.
        finish_reason: `[B]` int64, `FINISHED_BY_STOP` or `FINISHED_BY_LENGTH`.
        row_ids: `[B]` int64, as in `PromptBatch`.
        prompt_length: P, the padded width of the prompts.
        domains: "" where there is none.
        score_components: named parts of the score, each `[B]`.
        group_ids: `[B]` int64, equal for the rows of one prompt, which are adjacent; by default
            every row is a group.
        scored: `[B]` bool, False on rows to which the scorer does not apply, from which only a
            teacher teaches; by default every row is scored.
        resampled: `[B]` bool, True on the rows of spare prompts; None where there are no spares.
        resampling_rounds: how often spare prompts were asked; None where there are none.
        sampler_logprobs: `[B, R]` of each token under the distribution that it was drawn from; None
            where the generator does not give them.
        teacher_logprobs: `[B, R]` the teacher's; None without one.
        teacher_states: `[B, R, H]` last hidden states of the teacher before token t; None unless
            its whole distributions are learnt.
        has_reward: False where the scorer says that its scores are no reward.
        taught: whether a teacher is learnt from, by the advantages or by its states.
        group_size: rows of each prompt in the whole rollout; None counts those of the first one.
    """

    sequences: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor | None
    scores: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor | None
    entropy: Tensor
    finish_reason: Tensor
    row_ids: Tensor
    prompt_length: int
    domains: tuple[str, ...]
    score_components: Mapping[str, Tensor]
    group_ids: Tensor = None  # type: ignore[assignment]
    scored: Tensor = None  # type: ignore[assignment]
    resampled: Tensor | None = None
    resampling_rounds: int | None = None
    sampler_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_states: Tensor | None = None
    has_reward: bool = True
    taught: bool = False
    group_size: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        if self.group_ids is None:
            object.__setattr__(self, "group_ids", self.row_ids)
        if self.group_size is None:
            count = int((self.group_ids == self.group_ids[:1]).sum())
            object.__setattr__(self, "group_size", count)
        if self.scored is None:
            object.__setattr__(self, "scored", torch.ones_like(self.row_ids, dtype=torch.bool))
        rows, response = self.response_mask.shape
        tokens = ["logprobs", "ref_logprobs", "rewards", "advantages", "entropy"]
        optional = ("values", "returns", "sampler_logprobs", "teacher_logprobs")
        tokens += [name for name in optional if getattr(self, name) is not None]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(tokens, (rows, response))
        shapes |= dict.fromkeys(
            ("scores", "scored", "finish_reason", "row_ids", "group_ids"), (rows,)
        )
        if self.teacher_states is not None:
            shapes["teacher_states"] = (rows, response, self.teacher_states.shape[-1])
        width = self.prompt_length + response
        self._check(shapes | dict.fromkeys(("sequences", "attention_mask"), (rows, width)))
        self._check_mask("attention_mask", "response_mask", "scored")

    @classmethod
    def of(cls, prompts: PromptBatch, generation: Generation, **found: Any) -> Self:
        """Return the rollout of prompts and responses, with what was found out about them."""
        return cls(
            sequences=generation.sequences,
            response_mask=generation.response_mask,
            sampler_logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
            row_ids=prompts.row_ids,
            group_ids=prompts.group_ids,
            domains=prompts.domains,
            prompt_length=prompts.input_ids.shape[1],
            **found,
        )

    @property
    def loss_mask(self) -> Tensor:
        """`[B, R]` bool, True on the policy's actions that are trained on: those of scored rows.

        With a teacher those of all rows.
        """
        return self.response_mask if self.taught else self.reward_mask

    @property
    def reward_mask(self) -> Tensor:
        """`[B, R]` bool, True on the actions of scored rows, whose rewards are known."""
        return self.response_mask & self.scored.unsqueeze(-1)

    @property
    def known_scores(self) -> Tensor:
        """`[B]` scores, float32; NaN where the scorer does not apply, and without a reward."""
        return self.scores.float().where(self.scored & self.has_reward, torch.nan)

    @property
    def query_tensors(self) -> Tensor:
        """`[B, P]` prompt ids, padded on the left."""
        return self.sequences[:, : self.prompt_length]

    @property
    def response_tensors(self) -> Tensor:
        """`[B, R]` response ids; what stands off `response_mask` is padding."""
        return self.sequences[:, self.prompt_length :]

    def by_group(self, values: Tensor) -> Tensor:
        """Return values of the rows, `[B, ...]`, as `[B / group_size, group_size, ...]`.

        Raises:
            ValueError: if a prompt has one response, or these rows are not whole groups, the rows
                of each next to each other.
        """
        size, ids = self.group_size, self.group_ids
        if size < 2:
            raise ValueError(
                "by_group: each prompt has one response, and this loss compares several: set "
                "data.num_generations, in Python PromptDataModule(num_generations=2)"
            )
        if len(ids) % size or (ids != ids[::size].repeat_interleave(size)).any():
            found = torch.unique(ids).tolist()
            raise ValueError(
                f"by_group: {len(ids)} rows, of groups {found}, are not whole groups of {size}: "
                "set whole_groups_in_micro_batches = True in the module's class"
            )
        return values.reshape(-1, size, *values.shape[1:])

    def minibatches(
        self, num_minibatches: int, *, keys: Tensor, whole_groups: bool = False
    ) -> Iterator[Self]:
        """Yield `num_minibatches` batches of equal size that hold every row once.

        Of every `num_minibatches` neighbours each batch gets one, dealt in the order of their
        `keys` `[B]`. So the rows of a minibatch do not depend on how ranks share the rollout. With
        `whole_groups` the neighbours are groups of equal size, in the order of the keys of their
        first rows.

        Raises:
            ValueError: if `num_minibatches` does not divide the rows, or the groups.
        """
        size = self.group_size if whole_groups else 1
        unit = "groups of the rollout" if whole_groups else "rollout rows"
        count = len(self) // size
        if num_minibatches < 1 or count % num_minibatches:
            divisors = [n for n in range(1, min(count, 16) + 1) if count % n == 0]
            raise ValueError(
                f"num_minibatches={num_minibatches} must divide the {count} {unit}: "
                f"use one of {divisors}"
            )
        neighbours = torch.arange(count, device=keys.device).view(-1, num_minibatches)
        dealt = neighbours.gather(1, keys[::size].view(-1, num_minibatches).argsort(1))
        inside = torch.arange(size, device=keys.device)
        for index in dealt.unbind(1):
            yield self[(index.unsqueeze(1) * size + inside).flatten()]
