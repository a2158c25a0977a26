"""A key-value cache that is written in place and whose rows can leave.

Legend: S slots (rows the cache has room for), A rows in use, H key-value heads, T columns
(positions of the padded sequence), D head dimension, Q new tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

GROWTH = 512  # columns added at a time: 512 tokens of 64 rows are 4 GiB for a Llama-3-8B


class InPlaceLayer(CacheLayerMixin):
    """Keys and values of one layer, `[S, H, T, D]`, of which a window is in use.

    transformers' dynamic layer concatenates: every token copies all that came before it. Here a
    token is written in place and the model gets a view.

    Args:
        sliding_window: tokens that a query sees, itself included; None for all.
        widened: hold 16-bit keys and values as float32, for attention that computes in it.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, sliding_window: int | None = None, *, widened: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.widened = widened
        self.slots = 0  # S
        self.columns = 0  # room to make when keys and values are first seen
        self.prompt_columns = 0  # the first of them; a short prompt leaves some unwritten
        self.first_row, self.rows = 0, 0
        self.start, self.end = 0, 0  # columns in use

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room, in the precision in which attention will run.

        Under autocast rotated keys arrive in float32 and attention casts them, all of them, at
        every token. Cast once when they are stored, they have the same bits.
        """
        self.keys = self._room(key_states, self.columns)
        self.values = self._room(value_states, self.columns)
        self.is_initialized = True

    def _room(self, states: Tensor, columns: int) -> Tensor:
        _, heads, _, width = states.shape
        device, dtype = states.device.type, states.dtype
        if self.widened:
            dtype = torch.promote_types(dtype, torch.float32)
        elif dtype == torch.float32 and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        room = states.new_empty((self.slots, heads, columns, width), dtype=dtype)
        room[:, :, : self.prompt_columns] = 0.0  # a NaN would spread: attention gives it weight 0
        return room

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write `[A, H, Q, D]` behind what is there; return all that Q may see, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = self.get_mask_sizes(key_states.shape[2])[0]
        before, self.end = self.end, self.end + key_states.shape[2]
        rows = slice(self.first_row, self.first_row + self.rows)
        self.keys[rows, :, before : self.end] = key_states
        self.values[rows, :, before : self.end] = value_states
        if before == self.start:
            return key_states, value_states
        columns = slice(self.end - seen, self.end)
        return self.keys[rows, :, columns], self.values[rows, :, columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns the next `query_length` tokens see, and how many they do not."""
        past = self.end - self.start
        visible = past if self.sliding_window is None else min(past, self.sliding_window - 1)
        return visible + query_length, past - visible

    def get_seq_length(self) -> int:
        """Return the columns in use."""
        return self.end - self.start

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def grow(self, columns: int) -> None:
        """Make room for `columns` columns of the rows in use, and only for those rows."""
        self.slots, self.columns = self.rows, columns
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty((self.rows, old.shape[1], columns, old.shape[3]))
            new[:, :, self.start : self.end] = old[: self.rows, :, self.start : self.end]
            setattr(self, name, new)

    def copy_rows(self, source: Tensor, target: Tensor | slice) -> None:
        """Copy the columns in use of slots `source` into slots `target`."""
        if not self.is_initialized:
            return
        columns = slice(self.start, self.end)
        self.keys[target, :, columns] = self.keys[source, :, columns]
        self.values[target, :, columns] = self.values[source, :, columns]


class InPlaceCache(Cache):
    """The layers of one generation, moved together.

    Args:
        config: configuration of the model.
        slots: largest number of rows.
        prompt_columns: padded length of the prompts.
        max_columns: that length plus the longest response; room is made as it is needed.
        widened: hold 16-bit keys and values as float32.

    Raises:
        TypeError: if the model keeps a state that is no key-value cache.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        slots: int,
        prompt_columns: int,
        max_columns: int,
        widened: bool = False,
    ) -> None:
        layers = [_in_place(layer, widened=widened) for layer in DynamicCache(config=config).layers]
        super().__init__(layers=layers)
        self.in_place = [layer for layer in layers if isinstance(layer, InPlaceLayer)]
        self.max_columns = max_columns
        self.columns = min(prompt_columns + GROWTH, max_columns)
        for layer in self.in_place:
            layer.slots, layer.columns = slots, self.columns
            layer.prompt_columns = prompt_columns

    def use(self, *, first_row: int, rows: int, start: int, end: int) -> None:
        """Let the next forward continue slots `first_row` ... after columns `start` ... `end`."""
        for layer in self.in_place:
            layer.first_row, layer.rows, layer.start, layer.end = first_row, rows, start, end

    def reserve(self, columns: int) -> None:
        """Have room for `columns` columns of the rows in use."""
        if columns > self.columns:
            self.columns = min(max(columns, self.columns + GROWTH), self.max_columns)
            for layer in self.in_place:
                layer.grow(self.columns)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values, once there are some."""
        return self.in_place[0].keys.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values, once there are some."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.in_place)

    def copy_rows(self, source: Tensor, target: Tensor | slice) -> None:
        """Copy slots `source` into slots `target`."""
        for layer in self.in_place:
            layer.copy_rows(source, target)


def cache_argument(model: Any, cache: Cache) -> dict[str, Cache]:
    """Return `cache` under the name that the forward of `model` has for it.

    The name is `cache` from transformers 5.24 on and `past_key_values` before; a model with code of
    its own may have either.
    """
    named = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if named else "past_key_values": cache}


def _in_place(layer: Any, *, widened: bool) -> Any:
    if type(layer) is DynamicLayer:
        return InPlaceLayer(widened=widened)
    if type(layer) is DynamicSlidingWindowLayer:
        return InPlaceLayer(layer.sliding_window, widened=widened)
    if type(layer) is getattr(cache_utils, "DummyLayer", None):  # from transformers 5.23 on
        return layer
    told = f"rollout=cached holds keys and values, but this model has a {type(layer).__name__}"
    raise TypeError(f"{told}: use rollout=transformers")
