"""Teachers: how likely a model that is learnt from finds the policy's responses.

Legend: B rows, P padded prompt, R response, H hidden size of the teacher, b rows of a micro-batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.distributed.collectives import agreed_max
from rlhf_lightning.functional.logprobs import LARGEST
from rlhf_lightning.models.forward import by_micro_batch, response_statistics
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.rollout.scorers.base import Responses, check_context, response_texts_of
from rlhf_lightning.rollout.scorers.hparams import HttpScorerHparams, check_url
from rlhf_lightning.rollout.scorers.http import ServiceError, ask_service, on_every_rank
from rlhf_lightning.text.decode import decoded
from rlhf_lightning.text.messages import CONVERSATION, RENDERED, as_text, fields_of
from rlhf_lightning.text.tokens import TextEncoder, prompt_ids

VLLM_MINUS_INFINITY = -9999.0  # what vLLM writes for it, which JSON cannot hold
NUM_PROBED = 4096  # tokens whose text a server must read as the policy's tokenizer does
KEY = "VLLM_API_KEY"
SECONDS = 600.0  # of a request: the server queues what it is sent at once
NUM_AT_ONCE = 32  # requests: the server batches them
FIX = (
    "check that teacher= is a server of vLLM, with /tokenize beside /v1, that its context has room "
    f"for a row, and that its key is in the environment variable {KEY}"
)
Unsharded = Callable[[nn.Module], AbstractContextManager[Any]]


class Taught(NamedTuple):
    """The reply of a teacher about responses.

    Args:
        logprobs: `[B, R]` of the tokens, nats, 0 off the mask.
        states: `[B, R, H]` last hidden states before the tokens; None if not asked for.
    """

    logprobs: Tensor
    states: Tensor | None = None


@dataclass(eq=False)
class ModelTeacher:
    """A frozen model in this process.

    Args:
        model: the model.
        prompt: builds its prompts; None for those of the policy.
    """

    model: PolicyModel
    prompt: TeacherPrompt | None = None

    def to(self, device: torch.device) -> Self:
        """Put the model on a device; return this teacher."""
        self.model.to(device)
        return self

    def check(self, prompts: Iterable[Mapping[str, Any]], *, temperature: float) -> None:
        """Check that it can be asked about responses to prompts with these columns.

        Raises:
            ValueError: if it cannot, with the reason.
        """
        if self.prompt is not None:
            self.prompt.check(prompts)

    @torch.no_grad()
    def __call__(
        self,
        responses: Responses,
        *,
        temperature: float,
        micro_batch_size: int | None,
        with_states: bool = False,
        unsharded: Unsharded = nullcontext,
    ) -> Taught:
        """Return its reply about the responses.

        Args:
            responses: prompts with the policy's responses.
            temperature: divides its logits, as those of the policy.
            micro_batch_size: rows in one forward.
            with_states: return its hidden states too.
            unsharded: gathers a sharded model for all micro-batches.

        Raises:
            ValueError: see `TeacherPrompt`, or if its context is shorter than a row.
        """
        read = responses if self.prompt is None else self.prompt.before(responses)
        check_context(self.model.model, read.attention_mask)

        def of_rows(rows: Tensor) -> tuple[Tensor, ...]:
            found = response_statistics(
                self.model,
                read.rows(rows),
                temperature=temperature,
                with_entropy=False,
                with_states=with_states,
            )
            return (found.logprobs,) if found.states is None else (found.logprobs, found.states)

        with unsharded(self.model.root):
            said = by_micro_batch(of_rows, read.attention_mask, micro_batch_size, agree=agreed_max)
        return Taught(*said)


class TeacherPrompt:
    """Puts another prompt before the responses: the teacher may know what the policy does not.

    With the policy's own start as teacher and a worked solution in the prompt this is
    self-distillation; with instructions in the prompt, context distillation.

    Args:
        template: text with columns of the prompts in braces; it takes the place of the prompt, or
            of the last message of a conversation, whose text is `{prompt}`.
        tokenizer: of policy and teacher.

    Raises:
        ValueError: if `template` is none.

    Source: Snell et al. 2022, "Learning by distilling context", with own responses.
    """

    def __init__(self, template: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.template = template
        self.fields = fields_of(template, "teacher_prompt")
        self._encoder = TextEncoder(tokenizer)

    def check(self, prompts: Iterable[Mapping[str, Any]]) -> None:
        """Check that each prompt, given as its columns, has a text for every field.

        Raises:
            ValueError: naming the first that has none, or is `rendered`.
        """
        for number, columns in enumerate(prompts, start=1):
            if columns.get(CONVERSATION) == RENDERED:
                told = f"teacher_prompt={self.template!r}: prompt {number} is rendered by a chat"
                raise ValueError(f"{told} template, which no text can be around. Give the messages")
            lacking = [name for name in self.fields if not as_text(columns.get(name)).strip()]
            if lacking:
                known = ", ".join(sorted(columns.keys() - {CONVERSATION}))
                told = f"teacher_prompt={self.template!r}: prompt {number} has no "
                fix = f"leave it out of the data, or take a column of {known}"
                raise ValueError(f"{told}{', '.join(lacking)}: {fix}")

    def before(self, responses: Responses) -> Responses:
        """Return the responses behind the prompts of the teacher, `[B, P' + R]`.

        Raises:
            ValueError: see `check`.
        """
        device, mask = responses.sequences.device, responses.response_mask
        rows = [torch.tensor(ids) for ids in self._ids(responses)]
        real = [torch.ones_like(ids, dtype=torch.bool) for ids in rows]
        # [B, P'] each
        padded, given = (pad_sequence(x, True, 0, "left").to(device) for x in (rows, real))
        answers = responses.sequences[:, -mask.shape[1] :]
        return replace(
            responses,
            prompts=replace(responses.prompts, input_ids=padded, attention_mask=given),
            generation=replace(responses.generation, sequences=torch.cat([padded, answers], 1)),
            attention_mask=torch.cat([given, mask], 1),
        )

    def _ids(self, responses: Responses) -> list[list[int]]:
        columns, found = responses.prompts.columns, []
        known: dict[Any, list[int]] = {}  # a group has one prompt
        for row, text in enumerate(response_texts_of(responses)):
            values = {name: values[row] for name, values in columns.items()}
            *turns, last = text.messages or [{"content": text.prompt}]
            values["prompt"] = last["content"]
            self.check([values])
            asked = self.template.format_map({k: as_text(values[k]) for k in self.fields})
            key = asked, values.get(CONVERSATION)
            if key not in known:
                prompt = asked if text.messages is None else (*turns, {**last, "content": asked})
                known[key] = prompt_ids(prompt, self._encoder, variables=text.variables)
            found.append(known[key])
        return found


class ServerTeacher:
    """A teacher behind vLLM's HTTP API: log-probabilities of given tokens, and nothing else.

    It is asked directly, without a proxy of the environment. The environment variable
    `VLLM_API_KEY`, by which vLLM itself takes a key, is sent if it is set.

    Args:
        url: address of the server, such as `http://HOST:8000`, with `/v1` or without.
        tokenizer: of the policy.
        prompt: builds its prompts; None for those of the policy.

    Raises:
        ValueError: if `url` is no address.
    """

    def __init__(
        self, url: str, tokenizer: PreTrainedTokenizerBase, prompt: TeacherPrompt | None = None
    ) -> None:
        check_url(url, "teacher", KEY)
        parts = urlsplit(url)
        self.url = f"{parts.scheme}://{parts.netloc}"
        if parts.query or parts.fragment or parts.path.rstrip("/") not in ("", "/v1"):
            told = f"teacher={self.url}/... must be http://HOST[:PORT], with /v1 or nothing"
            raise ValueError(f"{told} behind it; a key belongs into the environment variable {KEY}")
        self.tokenizer: Any = tokenizer
        self.prompt = prompt
        self._is_checked = False

    def to(self, device: torch.device) -> Self:
        """Return this teacher, which holds nothing on a device."""
        return self

    def check(self, prompts: Iterable[Mapping[str, Any]], *, temperature: float) -> None:
        """Check the prompts, that the server is there, and that it reads text as the policy does.

        Raises:
            ServiceError: if it gives no usable reply.
            ValueError: if its tokenizer is another one, or for another temperature than 1.
        """
        if self.prompt is not None:
            self.prompt.check(prompts)
        self._check_temperature(temperature)
        self._check_tokenizer()

    def _check_temperature(self, temperature: float, *, with_states: bool = False) -> None:
        if temperature != 1.0 or with_states:
            told = f"teacher={self.url} gives log-probabilities of given tokens at temperature 1"
            fix = "use divergence=sampled and temperature 1, or a teacher in this process"
            raise ValueError(f"{told}: {fix}")

    def _check_tokenizer(self) -> None:
        size = len(self.tokenizer)
        special = {*self.tokenizer.added_tokens_decoder, *self.tokenizer.all_special_ids}
        ids = sorted({*range(0, size, max(size // NUM_PROBED, 1)), *special})
        text = " ".join(decoded([token], self.tokenizer) for token in ids)
        own = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        (reply,) = self._asked("/tokenize", [{"prompt": text, "add_special_tokens": False}])
        if not isinstance(reply, Mapping) or reply.get("tokens") != own:
            told = f"teacher={self.url} reads other tokens: it has another tokenizer"
            fix = "Take a teacher of the policy's family, or train on its texts (SFT)"
            raise ValueError(f"{told}. {fix}")
        self._is_checked = True

    @torch.no_grad()
    def __call__(
        self,
        responses: Responses,
        *,
        temperature: float,
        micro_batch_size: int | None,
        with_states: bool = False,
        unsharded: Unsharded = nullcontext,
    ) -> Taught:
        """Return its reply about the responses; see `ModelTeacher`.

        Raises:
            ServiceError: on every rank, if the server failed on one of them.
            ValueError: see `check`; for another temperature than 1, or hidden states.
        """
        self._check_temperature(temperature, with_states=with_states)
        read = responses if self.prompt is None else self.prompt.before(responses)
        mask, width = read.response_mask, read.response_mask.shape[1]
        pairs = zip(read.sequences.cpu(), read.attention_mask.cpu(), strict=True)
        rows = [ids[real].tolist() for ids, real in pairs]
        how = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}

        def ask() -> list[list[float]]:
            if not self._is_checked:
                self._check_tokenizer()
            replies = self._asked("/v1/completions", [{"prompt": ids, **how} for ids in rows])
            lengths = mask.sum(1).tolist()
            return [self._read(*row) for row in zip(replies, rows, lengths, strict=True)]

        said = on_every_rank(ask, mask.device, f"another rank got no reply from {self.url}")
        padded = [values + [0.0] * (width - len(values)) for values in said]
        return Taught(torch.tensor(padded, dtype=torch.float32, device=mask.device))

    def _asked(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the replies to requests, in their order."""
        key = os.environ.get(KEY, "").strip() or None
        hparams = HttpScorerHparams(url=self.url + path, timeout=SECONDS, concurrency=NUM_AT_ONCE)
        return ask_service(hparams, bodies, key=key, fix=FIX)

    def _read(self, reply: Any, ids: Sequence[int], length: int) -> list[float]:
        """Return the log-probabilities of the last `length` of the ids that were sent."""
        try:
            (choice,) = reply["choices"]
            tokens = list(zip(choice["prompt_logprobs"], ids, strict=True))[len(ids) - length :]
            found = [said[str(token)]["logprob"] for said, token in tokens]
        except (TypeError, KeyError, ValueError):
            found = [None]
        fits = [type(v) in (int, float) and VLLM_MINUS_INFINITY < v <= LARGEST for v in found]
        if not all(fits):
            value = f"{found[fits.index(False)]!r:.40} as the log-probability of a token"
            fix = "a server of vLLM without --logprobs-mode gives finite ones, at most 0"
            raise ServiceError(f"{self.url} returned {value}: {fix}")
        return [float(value) for value in found]


Teacher = ModelTeacher | ServerTeacher
