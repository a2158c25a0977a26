"""One token of every row as a step of fixed shapes and addresses, which a CUDA graph can hold.

Legend: B rows that there is room for, S slots in use, T columns in use, R response,
H key-value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from rlhf_lightning.rollout.generators.active_rows import RunningRows
from rlhf_lightning.rollout.generators.kv_cache import InPlaceCache, InPlaceLayer, cache_argument
from rlhf_lightning.rollout.generators.llama_decoder import LlamaDecoder
from rlhf_lightning.rollout.generators.prepared_weights import PreparedWeights
from rlhf_lightning.rollout.noise import sample_unchecked

COLUMNS = 256  # T is a multiple of this, so that early steps do not attend over the whole response


def multiple(number: int, of: int) -> int:
    """Return the next multiple of `of` from `number` on."""
    return -(-number // of) * of


class Step:
    """One more token for every slot: tensor operations only, nothing that waits for the host.

    Args:
        model: a causal language model with full attention.
        cache: its keys and values, with room for `room`.
        room: rows B, columns and response tokens R at most.
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        weights: copies of the model's weights that stay where they are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: InPlaceCache,
        room: tuple[int, int, int],
        stop_ids: Sequence[int],
        pad_token_id: int,
        weights: PreparedWeights,
    ) -> None:
        rows, columns, length = self.room = room
        device = model.device
        self.model: Any = model
        self.weights = weights
        self.llama = LlamaDecoder.of(model, weights)
        self.in_place, self.pad_token_id = cache, pad_token_id
        self.stops = torch.tensor(stop_ids, dtype=torch.long, device=device)
        self.uniform = torch.zeros(rows, length, dtype=torch.float64, device=device)
        self.responses = torch.full((rows, length), pad_token_id, device=device)
        self.logprobs = torch.zeros(rows, length, device=device)
        self.rows = torch.arange(rows, device=device)  # [B] row in each slot, as the next three
        self.first = torch.zeros_like(self.rows)  # column of the first token
        self.tokens = torch.zeros_like(self.rows)
        self.stopped = torch.zeros_like(self.rows, dtype=torch.bool)
        self.finite = torch.ones(1, dtype=torch.bool, device=device)
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # the token written last
        self.column = torch.zeros_like(self.t)  # where the next key goes
        self.bias = torch.tensor([0.0, float("-inf")], device=device)
        self.positions = torch.arange(columns, device=device)
        self.slots, self.columns = rows, 0
        self.temperature = 1.0
        self.truncated: Callable[[Tensor, float], Tensor] = _as_it_is
        self._views: dict[tuple[int, int], Cache] = {}

    def has_room(self, rows: int, columns: int, length: int) -> bool:
        """Return whether a generation of this size fits."""
        return all(a <= b for a, b in zip((rows, columns, length), self.room, strict=True))

    @property
    def shape(self) -> tuple[int, int]:
        """Slots and columns, on which the shapes of a step depend and nothing else."""
        return self.slots, self.columns

    def start(
        self,
        running: RunningRows,
        uniform: Tensor,
        temperature: float,
        truncated: Callable[[Tensor, float], Tensor],
    ) -> None:
        """Begin a generation.

        Args:
            running: the rows, whose prompts are read afterwards.
            uniform: noise of each row and token, `[rows, R]`.
            temperature: divides the logits.
            truncated: logits `[S, V]` and temperature -> the logits that are sampled.
        """
        count, length = uniform.shape
        self.temperature, self.truncated = temperature, truncated
        self.slots, self.columns = self._slots_for(count), 0
        self.uniform[:count, :length] = uniform
        self.responses.fill_(self.pad_token_id)
        # A slot without a row writes tokens that nobody reads.
        self.rows.copy_(torch.arange(self.room[0], device=self.rows.device))
        self.rows[:count] = running.rows
        self.first.fill_(running.width - 1)
        self.first[:count] = (running.width - running.lengths).to(self.first.device)
        self.stopped.fill_(True)
        self.stopped[:count] = False
        self.finite.fill_(True)
        self.t.fill_(-1)
        self.column.fill_(running.width)

    def sample(self, logits: Tensor) -> None:
        """Append to each slot the token sampled from `logits` `[S, V]`, or of its first rows."""
        self.t += 1
        slots = len(logits)
        rows = self.rows[:slots]
        logits = self.truncated(logits, self.temperature)
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
        # Added to the products, in their dtype: of a bool mask every layer would make its own.
        seen, hidden = self.bias.to(self.in_place.dtype)
        bias = torch.where(visible, seen, hidden)
        logits = self._forward(self.tokens[:slots], self.column - first, bias[:, None, None])
        self.column += 1
        self.sample(logits)

    def _forward(self, tokens: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """Return logits `[S, V]` after `tokens` `[S]` at `positions` `[S, 1]`."""
        cache = self._view()
        if self.llama is not None:
            return self.llama(tokens, positions, bias, cache.layers, self.column)
        output = self.model(
            input_ids=tokens.unsqueeze(-1),
            attention_mask=bias,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache_argument(self.model, cache),
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def fit_columns(self, columns: int) -> None:
        """Attend over at least `columns` columns."""
        if columns > self.columns:
            self.columns = multiple(columns, COLUMNS)

    def drop_ended(self, going: Tensor) -> None:
        """Keep half of the slots, or a quarter ..., if that holds those where `going` is True.

        Args:
            going: `[S]` of the slots in use, on the host.
        """
        slots = self._slots_for(int(going.sum()))
        if slots >= self.slots:
            return
        # The slots that go on, then some that have ended, so that no row is in two slots.
        order = (~going).int().argsort(stable=True)[:slots].to(self.rows.device)
        self.in_place.use(first_row=0, rows=self.slots, start=0, end=self.columns)
        self.in_place.copy_rows(order, slice(0, slots))
        for state in (self.rows, self.first, self.tokens, self.stopped):
            state[:slots] = state[order]
        self.slots = slots

    def _slots_for(self, count: int) -> int:
        """Return the smallest halving of the room that holds `count` rows."""
        slots = self.room[0]
        while slots > 1 and (slots + 1) // 2 >= count:
            slots = (slots + 1) // 2
        return slots

    def _view(self) -> Cache:
        """Return the part of the cache that has the shape of this step."""
        if self.shape not in self._views:
            self._views[self.shape] = Cache(
                layers=[
                    _Window(layer, *self.shape, self.column)
                    if isinstance(layer, InPlaceLayer)
                    else layer
                    for layer in self.in_place.layers
                ]
            )
        return self._views[self.shape]


class _Window(CacheLayerMixin):
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


def _as_it_is(logits: Tensor, temperature: float) -> Tensor:
    return logits
