"""Rows of different lengths, one after the other without padding, and padded for attention alone.

Legend: N tokens of a pack, b rows of a block, W their width, S slots of all blocks, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_lightning.models.cpu.attention import NAME

BUCKET = 16
# Decoders that hand `row_lengths` on to attention, and mix tokens nowhere else.
DECODERS = ("llama", "qwen2", "qwen3")


def packs_rows(model: nn.Module) -> bool:
    """Return whether every attention of `model` keeps packed rows apart; see `short_attention`.

    A sliding window would need a mask, and sharded weights run as transformers wrote their layers.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    weight = next(model.parameters(), None)
    return (
        bool(parts)
        and weight is not None
        and weight.device.type == "cpu"
        and all(_packs(part.config) for part in parts)
    )


def _packs(config: PretrainedConfig) -> bool:
    layers = getattr(config, "layer_types", None) or ()
    return (
        config.model_type in DECODERS
        and config._attn_implementation == NAME
        and set(layers) <= {"full_attention"}
    )


@dataclass(frozen=True)
class RowBlocks:
    """Rows of a pack, those of one length bucket in one block.

    Args:
        shapes: (b, W) of each block.
        places: `[N]` slot of each token among the S of all blocks.
        positions: `[W]` of the widest block: a token at each position; the last one repeats.
    """

    shapes: tuple[tuple[int, int], ...]
    places: Tensor
    positions: Tensor

    @classmethod
    def of(cls, row_lengths: tuple[int, ...]) -> RowBlocks:
        """Return the blocks of rows that follow each other."""
        return _blocks(row_lengths)

    def spread(self, tokens: Tensor) -> Tensor:
        """Return `[S, C]` of `[N, C]`, 0 where there is no token."""
        slots = tokens.new_zeros(sum(b * w for b, w in self.shapes), tokens.shape[1])
        return slots.index_copy_(0, self.places, tokens)

    def gather(self, slots: Tensor) -> Tensor:
        """Return `[N, C]` of `[S, C]`."""
        return slots.index_select(0, self.places)

    def __iter__(self) -> Iterator[tuple[slice, int, int]]:
        """Yield the slots of each block, b and W."""
        start = 0
        for rows, width in self.shapes:
            yield slice(start, start + rows * width), rows, width
            start += rows * width


@lru_cache(maxsize=8)  # all layers of a forward, and of its backward pass, ask for the same
def _blocks(row_lengths: tuple[int, ...]) -> RowBlocks:
    lengths = torch.tensor(row_lengths)
    widths = (lengths + BUCKET - 1) // BUCKET * BUCKET
    order = widths.argsort(stable=True)
    first_slot = torch.empty_like(widths)
    first_slot[order] = widths[order].cumsum(0) - widths[order]
    first_token = lengths.cumsum(0) - lengths
    places = torch.arange(int(lengths.sum())) + (first_slot - first_token).repeat_interleave(
        lengths
    )
    found, counts = widths.unique(return_counts=True)
    longest = int(lengths.argmax())
    positions = torch.arange(int(widths.max())).clamp(max=row_lengths[longest] - 1)
    return RowBlocks(
        tuple(zip(counts.tolist(), found.tolist(), strict=True)),
        places,
        first_token[longest] + positions,
    )
