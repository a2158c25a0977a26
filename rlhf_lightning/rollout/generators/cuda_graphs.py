"""Token-by-token sampling by captured CUDA graphs: one launch a token instead of a thousand.

A small model on a fast GPU waits for Python between kernels. A graph holds the whole step (forward,
sampling, bookkeeping) and is replayed. It needs fixed shapes, so rows that ended stay until half
of them have, and attention runs over a fixed number of columns under a mask.

The step itself is tested on a CPU, without a graph. The capture has never run: no GPU was at hand.
`rollout=cached` is the default for that reason.

Legend: B rows, S slots in use, T columns in use, P padded prompt, R response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from rlhf_lightning.rollout.generators.active_rows import RunningRows
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.generators.kv_cache import InPlaceCache, InPlaceLayer
from rlhf_lightning.rollout.noise import check_finite, sample_unchecked

COLUMNS = 256  # T is a multiple of this, so that early steps do not attend over the whole response


class CudaGraphsGenerator(CachedGenerator):
    """The tokens of `CachedGenerator` from captured graphs; for models with full attention.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        prefill_tokens: prompt tokens in one forward at most; bounds the memory.
        check_every: tokens between two looks at which rows have ended; each waits for the device.
        capture: False runs the same steps one kernel at a time, on any device.
    """

    def __init__(
        self,
        stop_ids: Sequence[int],
        pad_token_id: int,
        *,
        prefill_tokens: int = 16_384,
        check_every: int = 16,
        capture: bool = True,
    ) -> None:
        super().__init__(stop_ids, pad_token_id, prefill_tokens=prefill_tokens)
        if check_every < 1:
            raise ValueError(f"check_every={check_every} must be at least 1")
        self.check_every = check_every
        self.capture = capture

    def _write(
        self, running: RunningRows, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        if self.capture and uniform.device.type != "cuda":
            raise ValueError(
                f"rollout=cuda_graphs needs a CUDA device, the prompts are on {uniform.device}: "
                "use rollout=cached"
            )
        _check_supported(running)
        logits = running.read_prompts()
        running.cache.reserve(running.width + uniform.shape[1])
        step = _Step(running, uniform, self.stop_ids, self.pad_token_id, temperature)
        step.sample(logits, len(running.rows))
        replay: Callable[[], object] = step
        pool = torch.cuda.graph_pool_handle() if self.capture else None
        for t in range(1, uniform.shape[1]):
            changed = step.fit_columns(running.width + t)
            if t % self.check_every == 0:
                check_finite(step.finite)
                going = ~step.stopped[: step.slots]
                if not bool(going.any()):
                    break
                changed |= step.drop_if_half(going)
            if changed and self.capture:
                _warm(step)
                replay = _captured(step, pool)
            else:
                replay()
        check_finite(step.finite)
        return step.responses, step.logprobs


class _StaticLayer(CacheLayerMixin):
    """A fixed window of a layer's keys and values; new ones go to a column that a tensor names."""

    keys: Tensor
    values: Tensor

    def __init__(self, layer: InPlaceLayer, slots: int, columns: int, column: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = layer.keys[:slots, :, :columns]
        self.values = layer.values[:slots, :, :columns]
        self.columns, self.column = columns, column
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the room is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write `[S, H, 1, D]` and return the whole window; the mask says what of it counts."""
        self.keys.index_copy_(2, self.column, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.column, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the window's columns."""
        return self.columns, 0

    def get_seq_length(self) -> int:
        """Return the columns before the query's, were the window full."""
        return self.columns - 1

    def get_max_length(self) -> int:
        """Return the window's columns."""
        return self.columns


class _Step:
    """One more token for every slot: tensor operations only, nothing that waits for the host."""

    def __init__(
        self,
        running: RunningRows,
        uniform: Tensor,
        stop_ids: Sequence[int],
        pad_token_id: int,
        temperature: float,
    ) -> None:
        device = uniform.device
        self.model: Any = running.model
        self.in_place = running.cache
        self.uniform, self.temperature = uniform, temperature
        self.stops = torch.tensor(stop_ids, dtype=torch.long, device=device)
        self.responses = torch.full(uniform.shape, pad_token_id, device=device)  # [B, R]
        self.logprobs = torch.zeros(uniform.shape, device=device)  # [B, R]
        self.slots, self.columns = len(running.rows), 0
        self.rows = running.rows.clone()  # [B] row in each slot, as the others below
        self.first = (running.width - running.lengths).to(device)  # column of the first token
        self.tokens = torch.zeros_like(self.rows)
        self.stopped = torch.zeros_like(self.rows, dtype=torch.bool)
        self.finite = torch.ones(1, dtype=torch.bool, device=device)
        self.t = torch.full((1,), -1, device=device)  # the token written last
        self.column = torch.full((1,), running.width, device=device)  # where the next key goes
        self.positions = torch.arange(running.cache.max_columns, device=device)
        for layer in self.in_place.in_place:  # masked columns get weight 0, but 0 x NaN is NaN
            layer.keys[:, :, running.width :] = 0.0
            layer.values[:, :, running.width :] = 0.0

    def sample(self, logits: Tensor, slots: int) -> None:
        """Append to each row the token sampled from `logits` `[S, V]`."""
        self.t += 1
        rows = self.rows[:slots]
        uniform = self.uniform[rows, self.t]
        tokens, logprobs, finite = sample_unchecked(logits, uniform, temperature=self.temperature)
        self.responses[rows, self.t] = tokens
        self.logprobs[rows, self.t] = logprobs
        self.tokens[:slots] = tokens
        # Not torch.isin: for many ids it sorts, and waits for the host.
        self.stopped[:slots] |= (tokens.unsqueeze(-1) == self.stops).any(-1)
        self.finite &= finite.all()

    def __call__(self) -> None:
        """Run the forward of the last tokens and sample the next ones."""
        slots, first = self.slots, self.first[: self.slots].unsqueeze(-1)
        columns = self.positions[: self.columns]
        visible = (columns >= first) & (columns <= self.column)  # [S, T]
        output = self.model(
            input_ids=self.tokens[:slots].unsqueeze(-1),
            attention_mask=visible[:, None, None, :],
            position_ids=self.column - first,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.column += 1
        self.sample(output.logits[:, -1], slots)

    def fit_columns(self, columns: int) -> bool:
        """Attend over at least `columns` columns; say whether shapes have changed."""
        if columns <= self.columns:
            return False
        self.columns = min(-(-columns // COLUMNS) * COLUMNS, self.in_place.max_columns)
        self._view()
        return True

    def drop_if_half(self, going: Tensor) -> bool:
        """Keep the slots where `going` `[S]` is True, if they are at most half; say whether so."""
        kept = going.nonzero().flatten()
        if len(kept) * 2 > self.slots:
            return False
        self.in_place.copy_rows(kept, slice(0, len(kept)))
        for state in (self.rows, self.first, self.tokens, self.stopped):
            state[: len(kept)] = state[kept]
        self.slots = len(kept)
        self._view()
        return True

    def _view(self) -> None:
        self.cache = Cache(
            layers=[
                _StaticLayer(layer, self.slots, self.columns, self.column)
                if isinstance(layer, InPlaceLayer)
                else layer
                for layer in self.in_place.layers
            ]
        )
        self.in_place.use(first_row=0, rows=self.slots, start=0, end=self.columns)


def _check_supported(running: RunningRows) -> None:
    cache: InPlaceCache = running.cache
    windows = [layer.sliding_window for layer in cache.in_place]
    if any(window is not None and window < cache.max_columns for window in windows):
        raise TypeError(
            "rollout=cuda_graphs is for full attention, this model has sliding windows of "
            f"{sorted({w for w in windows if w is not None})} tokens: use rollout=cached"
        )
    attention = running.model.config._attn_implementation
    if ALL_MASK_ATTENTION_FUNCTIONS[attention] is not sdpa_mask:
        raise TypeError(
            f"rollout=cuda_graphs needs attn_implementation='sdpa', got {attention!r}: "
            "use rollout=cached"
        )


def _warm(step: _Step) -> None:
    """Run `step` on a stream of its own, as a first run before a capture must be."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)


def _captured(step: _Step, pool: Any) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    cached = torch.is_autocast_cache_enabled()
    # A cast kept by autocast would live in the graph's memory and be read outside of it.
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.cuda.graph(graph, pool=pool):
            step()
    finally:
        torch.set_autocast_cache_enabled(cached)
    return graph.replay
