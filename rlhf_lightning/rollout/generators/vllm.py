"""Generation by vLLM in server processes, with a check that they really have the policy's weights.

The check makes a silent fault loud: an engine that kept some weight, such as an output head that
is tied and was not sent, samples from another policy, and nothing else would show it but a slow,
unexplained drift.

vLLM draws its own random numbers. They are seeded per row, so a row's tokens do not depend on the
batch beyond rounding, but they are not the tokens of the other engines.

The weights are written one after the other, under the names of their Hugging Face checkpoint.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf_lightning.arguments import AtLeast0, Program, Seconds, StopIds, TokenId, checked
from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.distributed.collectives import gathered, rank
from rlhf_lightning.functional.logprobs import LARGEST, token_logprobs
from rlhf_lightning.models.loading import warn_once
from rlhf_lightning.rollout.generators.base import as_generation
from rlhf_lightning.rollout.generators.vllm_engine import Completion
from rlhf_lightning.rollout.generators.vllm_server import ServerPool
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import in_background

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlhf_vllm_"


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight as `save_pretrained` names it, a tied output head under its own name too.

    Adapters that are switched on are merged. A sharded weight is gathered when its turn comes, on
    every rank: all of them have to go through all weights. Of models whose weights transformers
    renames or fuses as it loads them, such as mixtures of experts, a layer is gathered at a time.
    """
    shapes = {
        # Of one element each: a simulation of memory counts bytes on "meta" too.
        name: torch.empty((), dtype=parameter.dtype, device="meta").expand(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    saved = revert_weight_conversion(model, shapes)
    if all(saved.get(name) is shape for name, shape in shapes.items()):
        yield from _loaded_weights(model)
        return
    for _, weights in groupby(_loaded_weights(model), key=lambda item: _layer(item[0])):
        yield from revert_weight_conversion(model, dict(weights)).items()


def _loaded_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its name in `model`."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, kind = name.partition(".base_layer.")
        weight = _merged(model.get_submodule(path)) if kind == "weight" else parameter.detach()
        if ".lora_" not in name:
            gather = getattr(weight, "full_tensor", None)
            yield name.replace(".base_layer.", "."), weight if gather is None else gather()


def _merged(layer: Any) -> Tensor:
    weight: Tensor = layer.base_layer.weight.detach()
    if layer.disable_adapters:
        return weight
    merged = weight.float()
    with torch.autocast(weight.device.type, enabled=False):  # it would round the product B A
        for adapter in layer.active_adapters:
            merged = merged + layer.get_delta_weight(adapter).detach()
    return merged


@contextmanager
def weight_files(model: PreTrainedModel, dtype: torch.dtype, *, write: bool) -> Iterator[Path]:
    """Yield a folder with config.json and one safetensors file a layer; it is removed afterwards.

    It is in shared memory where that has room, so that no disk is written and what is held here at
    a time is one layer.

    Args:
        model: gives weights and config.
        dtype: dtype of the files.
        write: False goes through the weights, for the sake of ranks that write, and leaves the
            folder empty.
    """
    needed = sum(p.numel() for p in model.parameters()) * dtype.itemsize if write else 0
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.1 * needed
    with tempfile.TemporaryDirectory(
        prefix=f"{PREFIX}{os.getpid()}_", dir=SHARED_MEMORY if roomy else None
    ) as name:
        folder = Path(name)
        layers = groupby(named_weights(model), key=lambda item: _layer(item[0]))
        for number, (_, weights) in enumerate(layers):
            if write:
                tensors = {n: w.to("cpu", dtype, copy=True).contiguous() for n, w in weights}
                save_file(tensors, folder / f"{number:05d}.safetensors")
            else:
                for _ in weights:  # gathered, and let go
                    pass
        if write:
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
            config.save_pretrained(folder)
        yield folder


def _layer(name: str) -> str:
    """Return the part of a weight's name that its layer's weights share."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])


CHECKED_ROWS, CHECKED_TOKENS = 4, 64  # whose log-probabilities are compared after each transfer
PROBE_TOKENS = 16  # a response, for the check before the others are written in the background
# A transfer that was dropped leaves a gap as large as an update, which may be below the tolerance.
GAP_GROWTH, SMALLEST_TOLERANCE = 10.0, 1e-4
QUANTIZED = (
    "lora.quantization=nf4 with rollout=vllm: vLLM would round the merged adapters to 4 bits, and "
    "sample from another policy: use rollout=auto, or lora=lora"
)
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


def check_responses(responses: Sequence[Completion], request: Request) -> None:
    """Check that every response ends at its first stop token or at `max_new_tokens`.

    No log-probability may be above 0; those that are not a number are left to who reads them.

    Args:
        responses: tokens and their log-probabilities, a row each.
        request: the request that they respond to.

    Raises:
        RuntimeError: if one does not, naming vLLM and the row, or for such a log-probability.
    """
    longest, stops = request.settings["max_new_tokens"], request.settings["stop_ids"]
    for row, (tokens, logprobs) in enumerate(responses):
        ends = [place for place, token in enumerate(tokens, 1) if token in stops]
        if len(tokens) != min([*ends, longest]):
            told = f"vLLM's response to row {row} has {len(tokens)} tokens, stops at {ends[:4]}"
            fix = "raise rollout.engine.max_model_len"
            raise RuntimeError(f"{told}, max_new_tokens={longest}: {fix}")
        if any(logprob > LARGEST for logprob in logprobs):
            told = f"vLLM's response to row {row} has a log-probability of {max(logprobs):g}"
            raise RuntimeError(f"{told}, and none is above 0: use another release of vLLM")


class VllmGenerator:
    """Continues prompts with vLLM in other processes; every call sends the weights first.

    Rank 0 starts the servers and talks to them; the prompts of all ranks are dealt to them in turn.
    A server that is lost ends the run.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        python: interpreter of an environment with vLLM.
        replicas: one server each, with these environment variables: the GPUs it may use
            (`CUDA_VISIBLE_DEVICES`), or its threads.
        timeout: seconds for one transfer of weights, or for the responses to one batch.
        start_timeout: seconds for a server to start.
        logprob_tolerance: mean difference, in nats a token, between vLLM's log-probabilities and
            the policy's.
        engine: arguments of `vllm.LLM`, such as `gpu_memory_utilization`; `tensor_parallel_size` is
            per replica. `dtype: auto` is what the policy computes in, and float32 where it has
            adapters: they are merged, and 16 bits round away what a young one changes.

    Raises:
        ValueError: without replicas, or for another dtype than vLLM's.
    """

    sends_weights = True  # a layer at a time: see `gathers_layers`

    @checked
    def __init__(
        self,
        stop_ids: StopIds,
        pad_token_id: TokenId,
        *,
        python: Program,
        replicas: Annotated[Sequence[Mapping[str, Any]], Field(min_length=1)] = ({},),
        timeout: Seconds = 600.0,
        start_timeout: Seconds = 600.0,
        logprob_tolerance: AtLeast0 = 0.05,
        engine: dict[str, Any] | None = None,
    ) -> None:
        self.stop_ids = tuple(stop_ids)
        self.pad_token_id = pad_token_id
        self.logprob_tolerance = logprob_tolerance
        self.options = {"dtype": "auto", **(engine or {})}
        if (dtype := self.options["dtype"]) not in DTYPES:
            raise ValueError(f"rollout.engine.dtype={dtype!r}: use {', '.join(DTYPES)}")
        self.largest_gap: float | None = None  # of the transfers so far
        self.pool = ServerPool(Path(python), replicas, timeout=timeout, start_timeout=start_timeout)
        # Rows that a server of each replica writes are among those that are compared.
        self.checked_rows = max(CHECKED_ROWS, len(self.pool.replicas))
        self.under_way: Future[list[Completion]] | None = None
        weakref.finalize(self, self.pool.end)  # at the end of this process too

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
            RuntimeError: if a server is lost or refuses a request, if vLLM's log-probabilities are
                not the policy's, or a response cannot be vLLM's; see `check_responses`.
        """
        request = self.request(prompts, noise, temperature, max_new_tokens)
        responses = self.responses(model, request)
        generation = self.generation(prompts, request, responses)
        self.check_logprobs(model, request, responses)
        return generation

    @torch.no_grad()
    def begin(
        self,
        model: PreTrainedModel,
        prompts: PromptBatch,
        *,
        noise: RowNoise,
        temperature: float,
        max_new_tokens: int,
    ) -> Callable[[], Generation]:
        """Send the weights, and return a function that waits for the responses.

        They are written while `model` may be trained on: its weights of now are checked before this
        returns, on the first tokens of some rows. Every rank has to call both functions.

        Raises:
            RuntimeError: see `__call__`. What becomes of the servers later is raised by the
                function that waits.
        """
        request = self.request(prompts, noise, temperature, max_new_tokens)
        rows, seeds, settings = request
        settings = settings | {"max_new_tokens": min(settings["max_new_tokens"], PROBE_TOKENS)}
        probe = Request(rows[: self.checked_rows], seeds[: self.checked_rows], settings)
        with ExitStack() as stack:
            stack.enter_context(self._sent(model))
            self.check_logprobs(model, probe, self._written(gathered(probe), stay_awake=True))
            asked = gathered(request)
            here = asked if rank() == 0 else []
            self.under_way = under_way = in_background(self._all_written, here)
            sent = stack.pop_all()  # the files have to be there until all is written

        def generation() -> Generation:
            with sent:
                made = gathered(under_way.result())[0]
            return self.generation(prompts, request, _own(asked, made))

        return generation

    def request(
        self, prompts: PromptBatch, noise: RowNoise, temperature: float, max_new_tokens: int
    ) -> Request:
        """Return what vLLM is asked for `prompts`."""
        pairs = zip(prompts.input_ids, prompts.attention_mask, strict=True)
        rows = [ids[mask].tolist() for ids, mask in pairs]
        seeds = (noise.uniform(prompts.row_ids, 0) * 2**53).long().tolist()
        limits = {"max_new_tokens": max_new_tokens, "stop_ids": list(self.stop_ids)}
        return Request(rows, seeds, {"temperature": temperature, **limits})

    def responses(self, model: PreTrainedModel, request: Request) -> list[Completion]:
        """Send the weights of `model`, and return what the servers write with them."""
        with self._sent(model):
            return self._written(gathered(request))

    def generation(
        self, prompts: PromptBatch, request: Request, responses: Sequence[Completion]
    ) -> Generation:
        """Return the responses to `prompts` as tensors.

        Raises:
            RuntimeError: if one is impossible; see `check_responses`.
        """
        width, device = request.settings["max_new_tokens"], prompts.input_ids.device
        check_responses(responses, request)
        sampled = _padded([ids for ids, _ in responses], width, self.pad_token_id)
        logprobs = _padded([values for _, values in responses], width, 0.0)
        if request.settings["temperature"] == 0:
            logprobs.zero_()  # there is one possible token
        made = sampled.to(device), self.stop_ids, self.pad_token_id, logprobs.to(device)
        return as_generation(prompts.input_ids, *made)

    def options_for(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`, with the dtype that `model` computes in.

        Adapters need float32; 16 bits that were asked for are a warning there.

        Raises:
            ValueError: for weights that are quantized: vLLM would quantize what is merged anew.
        """
        if not all(weight.is_floating_point() for weight in model.parameters()):
            raise ValueError(QUANTIZED)
        device, dtype = model.device.type, self.options["dtype"]
        if any(isinstance(module, LoraLayer) for module in model.modules()):
            if dtype not in ("auto", "float32"):
                told = f"rollout.engine.dtype={dtype} rounds away much of a young adapter"
                warn_once(f"{told}: leave it out (float32), or use rollout=cached")
            dtype = "float32" if dtype == "auto" else dtype
        elif dtype == "auto":
            autocast = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if autocast else model.dtype
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
            allowed = f"{tolerance:.2g}, logprob_tolerance={self.logprob_tolerance}"
            told = f"vLLM and the policy differ by {gap:.2g} nats a token (allowed: {allowed}; "
            told += f"before: {self.largest_gap})"
            raise RuntimeError(f"{told}: some weight has not arrived; use rollout=cached")
        self.largest_gap = max(gap, self.largest_gap or 0.0)

    @contextmanager
    def _sent(self, model: PreTrainedModel) -> Iterator[None]:
        """Give the servers the weights of `model`."""
        if self.under_way is not None:
            self.under_way.result()
        options, first = self.options_for(model), rank() == 0
        with weight_files(model, getattr(torch, options["dtype"]), write=first) as folder:
            if first:
                self.pool.load(str(folder), options)
            yield

    def _all_written(self, asked: Sequence[Request], **how: Any) -> list[Completion]:
        """Return the responses to the rows of all ranks, one rank after the other."""
        rows = [row for request in asked for row in request.rows]
        seeds = [seed for request in asked for seed in request.seeds]
        return self.pool.generate(rows, seeds, **asked[0].settings, **how) if asked else []

    def _written(self, asked: Sequence[Request], **how: Any) -> list[Completion]:
        """Return the responses to this rank's rows."""
        made = self._all_written(asked if rank() == 0 else [], **how)
        return _own(asked, gathered(made)[0])


def _own(asked: Sequence[Request], responses: Sequence[Completion]) -> list[Completion]:
    before = sum(len(request.rows) for request in asked[: rank()])
    return list(responses[before : before + len(asked[rank()].rows)])


def _padded(rows: Sequence[Sequence[float]], width: int, fill: float) -> Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
