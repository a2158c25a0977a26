"""Generation by vLLM, with a check that it really has the policy's weights.

The check makes a silent fault loud: an engine that kept some weight, such as an output head that
is tied and was not sent, samples from another policy, and nothing else would show it but a slow,
unexplained drift.

vLLM draws its own random numbers. They are seeded per row, so a row's tokens do not depend on the
batch beyond rounding, but they are not the tokens of the other engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.distributed.collectives import world_size
from rlhf_lightning.functional.logprobs import token_logprobs
from rlhf_lightning.rollout.generators.base import as_generation
from rlhf_lightning.rollout.generators.vllm_engine import Answer, Engine
from rlhf_lightning.rollout.generators.vllm_weights import named_weights, weight_files
from rlhf_lightning.rollout.noise import RowNoise

CHECKED_ROWS, CHECKED_TOKENS = 4, 64  # whose log-probabilities are compared after each transfer
DTYPES = ("auto", "float32", "bfloat16", "float16")


class Request(NamedTuple):
    """Prompts of one rank as vLLM is asked.

    Args:
        rows: token ids of each prompt, without padding.
        seeds: one a row.
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

    def __init__(
        self,
        stop_ids: Sequence[int],
        pad_token_id: int,
        *,
        logprob_tolerance: float = 0.05,
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
            RuntimeError: if vLLM's log-probabilities are not the policy's, or a response ended
                before its stop token or `max_new_tokens`.
        """
        request = self.request(prompts, noise, temperature, max_new_tokens)
        answers = self.answers(model, request)
        generation = self.generation(prompts, request, answers)
        self.check_logprobs(model, request, answers)
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
        self, prompts: PromptBatch, request: Request, answers: Sequence[Answer]
    ) -> Generation:
        """Return the answers to `prompts` as tensors.

        Raises:
            RuntimeError: if one ended before its stop token or `max_new_tokens`.
        """
        width, device = request.settings["max_new_tokens"], prompts.input_ids.device
        self._check_ends(answers, width)
        responses = _padded([ids for ids, _ in answers], width, self.pad_token_id)
        logprobs = _padded([values for _, values in answers], width, 0.0)
        if request.settings["temperature"] == 0:
            logprobs.zero_()  # there is one possible token
        return as_generation(
            prompts.input_ids,
            responses.to(device),
            self.stop_ids,
            self.pad_token_id,
            logprobs.to(device),
        )

    def answers(self, model: PreTrainedModel, request: Request) -> list[Answer]:
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
                    f"rollout=vllm needs vLLM in this environment ({error}): pip install -e "
                    "'.[vllm]' in one of its own, or use rollout=vllm_server or rollout=cached"
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
        self, model: PreTrainedModel, request: Request, answers: Sequence[Answer]
    ) -> None:
        """Compare vLLM's log-probabilities of some responses with those of `model`.

        Raises:
            RuntimeError: if they differ by more than `logprob_tolerance` on average.
        """
        rows, temperature = request.rows, request.settings["temperature"] or 1.0
        gaps: list[Tensor] = []
        # Every rank runs the same number of forwards: one with fewer rows repeats some.
        for number in range(self.checked_rows):
            row, (tokens, theirs) = rows[number % len(rows)], answers[number % len(rows)]
            kept = tokens[:CHECKED_TOKENS]
            ids = torch.tensor([[*row, *kept]], device=model.device)
            logits = model(input_ids=ids).logits[:, len(row) - 1 : -1]
            ours = token_logprobs(logits, ids[:, len(row) :], temperature=temperature)
            gaps.append((ours[0].float().cpu() - torch.tensor(theirs[: len(kept)])).abs())
        gap = float(torch.cat(gaps).mean())
        if not gap <= self.logprob_tolerance:
            raise RuntimeError(
                f"vLLM and the policy differ by {gap:.3f} nats a token on average after a "
                f"transfer of weights (logprob_tolerance={self.logprob_tolerance}): some weight "
                "has not arrived; use rollout=cached"
            )

    @property
    def checked_rows(self) -> int:
        """Number of rows of a rank's batch that are compared after a transfer."""
        return CHECKED_ROWS

    def _check_ends(self, answers: Sequence[Answer], max_new_tokens: int) -> None:
        for ids, _ in answers:
            if len(ids) != max_new_tokens and (not ids or ids[-1] not in self.stop_ids):
                raise RuntimeError(
                    f"vLLM ended a response after {len(ids)} of max_new_tokens={max_new_tokens} "
                    "tokens and without a stop token: raise rollout.engine.max_model_len"
                )


def _padded(rows: Sequence[Sequence[float]], width: int, fill: float) -> Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
