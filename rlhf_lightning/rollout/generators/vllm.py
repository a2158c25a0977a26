"""Generation by vLLM, with a check that it really has the policy's weights.

The check makes a silent fault loud: an engine that kept some weight, such as an output head that
is tied and was not sent, samples from another policy, and nothing else would show it but a slow,
unexplained drift.

vLLM draws its own random numbers. They are seeded per row, so a row's tokens do not depend on the
batch beyond rounding, but they are not the tokens of the other engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_lightning.arguments import AtLeast0, StopIds, TokenId, checked
from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.distributed.collectives import world_size
from rlhf_lightning.functional.logprobs import token_logprobs
from rlhf_lightning.rollout.generators.base import as_generation
from rlhf_lightning.rollout.generators.vllm_engine import Completion, Engine
from rlhf_lightning.rollout.generators.vllm_weights import named_weights, weight_files
from rlhf_lightning.rollout.noise import RowNoise

CHECKED_ROWS, CHECKED_TOKENS = 4, 64  # whose log-probabilities are compared after each transfer
# A transfer that was dropped leaves a gap as large as an update, which may be below the tolerance.
GAP_GROWTH, SMALLEST_TOLERANCE = 10.0, 1e-4
MOST_LOGPROB = 1e-3  # what rounding makes of 0
DTYPES = ("auto", "float32", "bfloat16", "float16")


class Request(NamedTuple):
    """Prompts of one rank, as they are sent to vLLM.

    Args:
        rows: token ids of each prompt, without padding.
        seeds: one seed per row.
        settings: temperature, max_new_tokens and stop_ids.
    """

    rows: list[list[int]]
    seeds: list[int]
    settings: dict[str, Any]

    def beginnings(self, num_rows: int, max_new_tokens: int) -> Request:
        """Return the request for the first tokens of the first rows."""
        settings = dict(self.settings)
        settings["max_new_tokens"] = min(settings["max_new_tokens"], max_new_tokens)
        return Request(self.rows[:num_rows], self.seeds[:num_rows], settings)


def check_responses(responses: Sequence[Completion], request: Request, *, num_tokens: int) -> None:
    """Check that vLLM can have written these responses to `request`.

    A log-probability may be NaN or -inf: where no loss reads it, it is counted.

    Args:
        responses: tokens and their log-probabilities, a row each.
        request: the request that they respond to.
        num_tokens: size of the vocabulary.

    Raises:
        RuntimeError: naming vLLM, the row and the value.
    """
    for row, answer in enumerate(responses):
        problem = _problem(answer, request.settings, num_tokens)
        if problem:
            raise RuntimeError(f"vLLM's response to row {row} {problem}")


def _problem(answer: Completion, settings: Mapping[str, Any], num_tokens: int) -> str | None:
    tokens, logprobs = answer
    longest, stops = settings["max_new_tokens"], settings["stop_ids"]
    strange = [t for t in tokens if type(t) is not int or not 0 <= t < num_tokens]
    odd = [p for p in logprobs if type(p) not in (float, int) or p > MOST_LOGPROB or -p > 1e300]
    odd = [p for p in odd if p != -torch.inf]  # is counted among those that are not finite
    early = next((place for place, token in enumerate(tokens[:-1]) if token in stops), None)
    if strange:
        return f"has the token {strange[0]!r:.40}, and the vocabulary has {num_tokens}"
    if len(tokens) != len(logprobs):
        return f"has {len(logprobs)} log-probabilities for {len(tokens)} tokens"
    if odd:
        return f"has the log-probability {odd[0]!r:.40}, which is none"
    if len(tokens) > longest:
        return f"has {len(tokens)} tokens, and max_new_tokens={longest}"
    if early is not None:
        return f"has {len(tokens)} tokens, and number {early + 1} is a stop token"
    if len(tokens) != longest and (not tokens or tokens[-1] not in stops):
        return (
            f"ended after {len(tokens)} of max_new_tokens={longest} tokens and without a stop "
            "token: raise rollout.engine.max_model_len"
        )
    return None


class VllmGenerator:
    """Continues prompts with vLLM in this process; every call sends the weights first.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        logprob_tolerance: mean difference, in nats a token, between vLLM's log-probabilities and
            the policy's.
        engine: arguments of `vllm.LLM`, such as `gpu_memory_utilization`. `dtype: auto` is what
            the policy computes in.

    Raises:
        ValueError: for another dtype than vLLM's.
    """

    name = "vLLM"

    @checked
    def __init__(
        self,
        stop_ids: StopIds,
        pad_token_id: TokenId,
        *,
        logprob_tolerance: AtLeast0 = 0.05,
        engine: dict[str, Any] | None = None,
    ) -> None:
        self.stop_ids = tuple(stop_ids)
        self.pad_token_id = pad_token_id
        self.logprob_tolerance = logprob_tolerance
        self.options = {"dtype": "auto", **(engine or {})}
        if self.options["dtype"] not in DTYPES:
            raise ValueError(
                f"rollout.engine.dtype={self.options['dtype']!r}: use {', '.join(DTYPES)}"
            )
        self.engine: Engine | None = None
        self.largest_gap: float | None = None  # of the transfers so far

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        prompts: PromptBatch,
        *,
        noise: RowNoise,
        temperature: float,
        max_new_tokens: int,
    ) -> Generation:
        """Return one response a prompt; see `Generator`.

        Raises:
            RuntimeError: if vLLM's log-probabilities are not the policy's, or a response cannot be
                vLLM's; see `check_responses`.
        """
        request = self.request(prompts, noise, temperature, max_new_tokens)
        responses = self.responses(model, request)
        num_tokens = model.config.vocab_size
        generation = self.generation(prompts, request, responses, num_tokens=num_tokens)
        self.check_logprobs(model, request, responses)
        return generation

    def request(
        self, prompts: PromptBatch, noise: RowNoise, temperature: float, max_new_tokens: int
    ) -> Request:
        """Return what vLLM is asked for `prompts`."""
        pairs = zip(prompts.input_ids, prompts.attention_mask, strict=True)
        rows = [ids[mask].tolist() for ids, mask in pairs]
        seeds = (noise.uniform(prompts.row_ids, 0) * 2**53).long().tolist()
        settings = {
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "stop_ids": list(self.stop_ids),
        }
        return Request(rows, seeds, settings)

    def generation(
        self,
        prompts: PromptBatch,
        request: Request,
        responses: Sequence[Completion],
        *,
        num_tokens: int,
    ) -> Generation:
        """Return the responses to `prompts`, of a vocabulary of `num_tokens`, as tensors.

        Raises:
            RuntimeError: if one is impossible; see `check_responses`.
        """
        width, device = request.settings["max_new_tokens"], prompts.input_ids.device
        check_responses(responses, request, num_tokens=num_tokens)
        sampled = _padded([ids for ids, _ in responses], width, self.pad_token_id)
        logprobs = _padded([values for _, values in responses], width, 0.0)
        if request.settings["temperature"] == 0:
            logprobs.zero_()  # there is one possible token
        return as_generation(
            prompts.input_ids,
            sampled.to(device),
            self.stop_ids,
            self.pad_token_id,
            logprobs.to(device),
        )

    def responses(self, model: PreTrainedModel, request: Request) -> list[Completion]:
        """Send the weights of `model`, and return what vLLM writes with them.

        Raises:
            ImportError: if vLLM is not installed.
            ValueError: on several ranks.
        """
        if world_size() > 1:
            raise ValueError(
                f"rollout=vllm runs in one process, and there are {world_size()}: use "
                "rollout=vllm_server"
            )
        if self.engine is not None:
            self.engine.load(weights_iterator=named_weights(model))
        else:
            options = self.options_for(model)
            try:
                with weight_files(model, getattr(torch, options["dtype"]), write=True) as folder:
                    self.engine = Engine(str(folder), options)
            except ImportError as error:
                raise ImportError(
                    f"rollout=vllm needs vLLM in this environment ({error}): use "
                    "rollout=vllm_server with a separate environment, or rollout=cached"
                ) from error
        return self.engine.generate(request.rows, request.seeds, **request.settings)

    def options_for(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`, with the dtype that `model` computes in."""
        if self.options["dtype"] != "auto":
            return self.options
        device, dtype = model.device.type, model.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return self.options | {"dtype": str(dtype).removeprefix("torch.")}

    @torch.no_grad()
    def check_logprobs(
        self, model: PreTrainedModel, request: Request, responses: Sequence[Completion]
    ) -> None:
        """Compare vLLM's log-probabilities of some responses with those of `model`.

        Raises:
            RuntimeError: if they differ on average by more than `logprob_tolerance`, or by far more
                than after any transfer before.
        """
        rows, temperature = request.rows, request.settings["temperature"] or 1.0
        gaps: list[Tensor] = []
        # Every rank runs the same number of forwards: one with fewer rows repeats some.
        for number in range(self.checked_rows):
            row, (tokens, theirs) = rows[number % len(rows)], responses[number % len(rows)]
            kept = tokens[:CHECKED_TOKENS]
            ids = torch.tensor([[*row, *kept]], device=model.device)
            logits = model(input_ids=ids).logits[:, len(row) - 1 : -1]
            ours = token_logprobs(logits, ids[:, len(row) :], temperature=temperature)
            gaps.append((ours[0].float().cpu() - torch.tensor(theirs[: len(kept)])).abs())
        gap, tolerance = float(torch.cat(gaps).mean()), self.logprob_tolerance
        if self.largest_gap is not None:
            tolerance = min(tolerance, max(GAP_GROWTH * self.largest_gap, SMALLEST_TOLERANCE))
        if not gap <= tolerance:
            raise RuntimeError(
                f"vLLM and the policy differ by {gap:.2g} nats a token (allowed: {tolerance:.2g}, "
                f"logprob_tolerance={self.logprob_tolerance}; before: {self.largest_gap}): some "
                "weight has not arrived; use rollout=cached"
            )
        self.largest_gap = max(gap, self.largest_gap or 0.0)

    @property
    def checked_rows(self) -> int:
        """Number of rows of a rank's batch that are compared after a transfer."""
        return CHECKED_ROWS


def _padded(rows: Sequence[Sequence[float]], width: int, fill: float) -> Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
