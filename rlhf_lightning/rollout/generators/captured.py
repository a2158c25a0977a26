"""Decoding by captured CUDA graphs: one launch a token instead of a thousand.

A small model on a fast GPU waits for Python between kernels. A graph holds a whole step (forward,
sampling, bookkeeping) and is replayed. It needs fixed shapes and fixed addresses: rows that ended
stay until half of them have, attention runs over a multiple of 256 columns under a mask, and
caches, copies of weights and graphs live as long as the generator.

Legend: B rows, S slots in use, T columns in use, P padded prompt, R response.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from rlhf_lightning.arguments import Size, StopIds, TokenId, checked
from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.distributed.collectives import is_sharded
from rlhf_lightning.models.attention import fixed_shapes
from rlhf_lightning.rollout.generators.active_rows import RunningRows
from rlhf_lightning.rollout.generators.base import CachedGenerator, as_generation
from rlhf_lightning.rollout.generators.captured_step import COLUMNS, Step, multiple
from rlhf_lightning.rollout.generators.kv_cache import InPlaceCache
from rlhf_lightning.rollout.generators.prepared_weights import (
    PreparedWeights,
    adapters_in_use,
    weights_cast_once,
)
from rlhf_lightning.rollout.noise import RowNoise, check_finite

# Of a device's memory: caches and copies of weights above it are freed after each generation.
# Captures are short beside the tokens of a model that large.
KEPT_SHARE = 0.1


def why_not_captured(config: PretrainedConfig, columns: int | None = None) -> str | None:
    """Return why a step of a model cannot be captured, or None where it can.

    Args:
        config: of the model.
        columns: prompt and response together, in tokens; None for any number.
    """
    attention = config._attn_implementation
    if attention and ALL_MASK_ATTENTION_FUNCTIONS[attention] is not sdpa_mask:
        return f"attn_implementation={attention!r} is not 'sdpa'"
    try:
        cache = InPlaceCache(config, slots=1, prompt_columns=1, max_columns=1)
    except TypeError:
        return "it keeps a state that is no key-value cache"
    windows = {layer.sliding_window for layer in cache.in_place} - {None}
    narrow = min((window for window in windows if window is not None), default=None)
    if narrow is not None and (columns is None or narrow < columns):
        return f"it attends within sliding windows of {narrow} tokens"
    rope = getattr(config, "rope_parameters", None) or {}  # of all layers, or by type of layer
    kinds = [
        part.get("rope_type") or "" for part in (rope, *rope.values()) if isinstance(part, dict)
    ]
    if any("dynamic" in kind or kind == "longrope" for kind in kinds):
        return "its rotary embedding depends on the longest row"
    if any(getattr(config, name, None) for name in _EXPERTS):
        return "it routes tokens to experts"
    return None


def bytes_kept(generator: Any, device: torch.device) -> int:
    """Return what `generator` may keep of the memory of a GPU between two generations, at most."""
    if not isinstance(generator, CapturedGenerator) or generator.capture is False:
        return 0
    return int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class CapturedGenerator(CachedGenerator):
    """The tokens of `CachedGenerator`, from captured CUDA graphs where the model is on CUDA.

    A model whose step cannot be captured (see `why_not_captured`), and one on another device, is
    decoded as by `CachedGenerator`; on CUDA a warning gives the reason.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        prefill_tokens: prompt tokens in one forward at most; bounds the memory.
        check_every: tokens between two looks at which rows have ended, and two calls of `watch`.
        capture: None captures where it can; True refuses where it cannot; False runs the same
            steps one kernel at a time, on any device.

    Raises:
        TypeError: for `capture=True` or `False` and a model whose step cannot be captured.
        ValueError: for `capture=True` and a model that is not on CUDA.
    """

    @checked
    def __init__(
        self,
        stop_ids: StopIds,
        pad_token_id: TokenId,
        *,
        prefill_tokens: Size = 16_384,
        check_every: Size = 16,
        capture: bool | None = None,
    ) -> None:
        super().__init__(stop_ids, pad_token_id, prefill_tokens=prefill_tokens)
        self.check_every = check_every
        self.capture = capture
        self._engine: _Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a device."""
        return vars(self) | {"_engine": None}

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
        """Return one response a prompt; see `Generator`."""
        if not self._captures(model, prompts.input_ids.shape[1] + max_new_tokens):
            return super().__call__(
                model, prompts, noise=noise, temperature=temperature, max_new_tokens=max_new_tokens
            )
        steps = torch.arange(max_new_tokens, device=prompts.row_ids.device)
        uniform = noise.uniform(prompts.row_ids.unsqueeze(-1), steps)  # [B, R]
        # What a validation, in inference mode, makes could not be written again in training.
        with torch.inference_mode(False), torch.no_grad(), weights_cast_once():
            engine, self._engine = self._engine, None  # a failure leaves nothing half written
            if engine is not None and not engine.fits(model):
                engine = None  # frees its memory before the next one takes its own
            engine = engine or _Engine(model, self.stop_ids, self.pad_token_id)
            with engine.weights.in_use():
                responses, logprobs = engine.write(self, prompts, uniform, temperature)
            generation = as_generation(
                prompts.input_ids, responses, self.stop_ids, self.pad_token_id, logprobs
            )
        if engine.worth_keeping():
            self._engine = engine
        return generation

    def _sampling(self, temperature: float) -> tuple[Any, ...]:
        """Return the temperature, and what else of the sampling a step depends on."""
        return (temperature,)

    def _captures(self, model: PreTrainedModel, columns: int) -> bool:
        """Return whether to decode `model` by fixed steps."""
        on_cuda = model.device.type == "cuda"
        if self.capture is None and not on_cuda:
            return False
        if self.capture and not on_cuda:
            raise ValueError(f"rollout.capture=true needs CUDA, not {model.device}: leave it out")
        reason = why_not_captured(model.config, columns)
        if reason is None:
            return True
        if self.capture is not None:
            raise TypeError(
                f"this model's decoding cannot be captured ({reason}): leave capture out"
            )
        warnings.warn(f"decoding runs token by token, without CUDA graphs: {reason}", stacklevel=3)
        return False


class _Engine:
    """Buffers and graphs of one model.

    Args:
        model: whose parameters may change in place between two calls.
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
    """

    def __init__(
        self, model: PreTrainedModel, stop_ids: tuple[int, ...], pad_token_id: int
    ) -> None:
        self.model, self.place = model, _place(model)
        self.stop_ids, self.pad_token_id = stop_ids, pad_token_id
        self.weights = PreparedWeights(model)
        self.cache: InPlaceCache | None = None
        self.step: Step | None = None
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.captured_with: Any = None  # what the graphs have been captured with
        self.pool: Any = None

    def fits(self, model: PreTrainedModel) -> bool:
        """Return whether this is the engine of `model`, where it is and as it computes now."""
        return self.model is model and self.place == _place(model)

    def write(
        self, how: CapturedGenerator, prompts: PromptBatch, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and their log-probabilities `[B, R]`; behind a stop they mean nothing."""
        width, (rows, length) = prompts.input_ids.shape[1], uniform.shape
        cache, step = self._buffers(rows, width, length)
        room: Any = {"max_new_tokens": length, "prefill_tokens": how.prefill_tokens}
        running = RunningRows(self.model, prompts, **room, cache=cache)
        step.start(running, uniform, temperature, how._truncated)
        step.sample(running.read_prompts())
        self._forget_if_changed(how._sampling(temperature))
        ended = _Ended(step)
        with fixed_shapes():
            for t in range(1, length):
                step.fit_columns(width + t)
                if t % how.check_every == 0:
                    if how.watch is not None:
                        how.watch(step.responses[:rows, :t])
                    going = ended.look()
                    if going is not None:
                        if not bool(going.any()):
                            break
                        step.drop_ended(going)
                    ended.ask()
                step() if how.capture is False else self._replay(step)
        check_finite(step.finite)
        return step.responses[:rows, :length], step.logprobs[:rows, :length]

    def _buffers(self, rows: int, width: int, length: int) -> tuple[InPlaceCache, Step]:
        """Return cache and step with room for `rows` rows; what was too small is made anew."""
        cache, step = self.cache, self.step
        columns = multiple(width + length, COLUMNS)
        if cache is None or step is None or not step.has_room(rows, columns, length):
            known = (0, 0, 0) if step is None else step.room
            rows, columns, length = map(max, known, (rows, columns, length))
            self.cache = self.step = cache = step = None  # frees its memory first
            self._drop_graphs()
            cache = InPlaceCache(
                self.model.config, slots=rows, prompt_columns=columns, max_columns=columns
            )
            room = rows, columns, length
            step = Step(self.model, cache, room, self.stop_ids, self.pad_token_id, self.weights)
            self.cache, self.step = cache, step
        return cache, step

    def _forget_if_changed(self, sampling: tuple[Any, ...]) -> None:
        """Drop the graphs if anything that they hold by address or value is another one."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        now = (*(x.data_ptr() for x in tensors), *sampling, adapters_in_use(self.model))
        if now != self.captured_with:
            self._drop_graphs()
            self.captured_with = now

    def _drop_graphs(self) -> None:
        self.graphs.clear()
        self.pool = None  # one whose graphs are gone takes no others

    def _replay(self, step: Step) -> None:
        """Run the step from its graph; a shape that is new runs once and is then captured."""
        graph = self.graphs.get(step.shape)
        if graph is not None:
            graph.replay()
            return
        _on_another_stream(step)
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        self.graphs[step.shape] = _captured(step, self.pool)

    def worth_keeping(self) -> bool:
        """Return whether buffers and graphs stay for the next call.

        Not under FSDP2, whose gathered weights go, nor where they take much of the device.
        """
        assert self.cache is not None
        if any(map(is_sharded, self.model.modules())):
            return False
        if self.model.device.type != "cuda":
            return True
        room = torch.cuda.get_device_properties(self.model.device).total_memory
        return self.cache.num_bytes + self.weights.num_bytes <= KEPT_SHARE * room


def _place(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return device and precision in which `model` computes now."""
    device = model.device
    autocast = torch.is_autocast_enabled(device.type)
    return device, autocast and torch.get_autocast_dtype(device.type), model.dtype


class _Ended:
    """Rows that have ended, seen one look late, so that the host never waits for a token."""

    def __init__(self, step: Step) -> None:
        self.step = step
        on_cuda = step.stopped.device.type == "cuda"
        self.flags = torch.zeros(len(step.stopped) + 1, dtype=torch.bool, pin_memory=on_cuda)
        self.copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self.asked = 0

    def ask(self) -> None:
        """Have the flags copied, without waiting."""
        self.asked = self.step.slots
        self.flags[: self.asked].copy_(self.step.stopped[: self.asked], non_blocking=True)
        self.flags[-1:].copy_(self.step.finite, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def look(self) -> Tensor | None:
        """Return `[S]` True where a row had not ended when asked; None before the first `ask`."""
        if not self.asked:
            return None
        if self.copied is not None:
            self.copied.synchronize()
        check_finite(self.flags[-1:])
        return ~self.flags[: self.asked]


def _on_another_stream(step: Callable[[], None]) -> None:
    """Run `step` on a stream of its own, as a first run before a capture must be."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)


def _captured(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    cached = torch.is_autocast_cache_enabled()
    # A cast kept by autocast would live in the graph's memory and be read outside of it.
    torch.set_autocast_cache_enabled(False)
    try:
        # Other threads may pin memory meanwhile: loaders and NCCL do.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step()
    finally:
        torch.set_autocast_cache_enabled(cached)
    return graph
