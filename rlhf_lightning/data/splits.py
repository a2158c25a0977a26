"""Train and validation split by prompt, so that no prompt is in both."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

logger = logging.getLogger(__name__)
T = TypeVar("T")


def split_fraction(key: str, seed: int) -> float:
    """Return the place of a prompt in [0, 1): uniform over prompts, a function of key and seed."""
    digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def split_by_key(
    rows: Sequence[T], keys: Sequence[str], *, validation_fraction: float, seed: int, name: str
) -> tuple[list[T], list[T]]:
    """Return (train, validation), each in the order of `rows`.

    A row goes to validation if the hash of its key, such as its prompt, and the seed falls below
    `validation_fraction`: all rows of one key land on one side, a key lands on the same side in
    every set that is split with the same seed, and adding rows moves no other. Where that leaves a
    side empty, the key nearest to the threshold moves there. A fraction of 0 asks for no validation
    at all.

    Args:
        rows: rows to split.
        keys: key of each row.
        validation_fraction: share of the keys held out.
        seed: seeds the hash.
        name: name of the source, for messages.

    Raises:
        ValueError: if there are fewer than two keys.
    """
    if validation_fraction == 0:
        return list(rows), []
    places = {k: split_fraction(k, seed) for k in keys}
    if len(places) < 2:
        fix = "give more prompts, a validation set, or validation_fraction=0"
        raise ValueError(f"{name}: a split by prompt needs two, and has {len(places)}: {fix}")
    held_out = {k for k, place in places.items() if place < validation_fraction}
    if not held_out:
        held_out = {min(places, key=lambda k: places[k])}
    elif len(held_out) == len(places):
        held_out.remove(max(places, key=lambda k: places[k]))
    train = [row for row, k in zip(rows, keys, strict=True) if k not in held_out]
    validation = [row for row, k in zip(rows, keys, strict=True) if k in held_out]
    return train, validation


def warn_of_shared(name: str, shared: set[str], count: int) -> None:
    """Log how many of `count` held-out prompts are trained on, if any."""
    if shared:
        found = f"{len(shared)} of {count} validation prompts are trained on too"
        logger.warning(f"{name}: {found}, so they are not new, e.g. {min(shared)[:60]!r}")


def warn_of_shared_turns(*splits: Sequence[Any]) -> None:
    """Log how many learnt turns of held-out rows are learnt in training, behind the same tokens.

    Args:
        splits: `EncodedSequence` rows of training, and held-out ones.
    """
    train, turns = (
        {
            hash(row.input_ids[:end].tobytes())
            for row in rows
            for end in np.flatnonzero(np.diff(row.loss_mask, append=False) & row.loss_mask) + 1
        }
        for rows in splits
    )
    if shared := train & turns:
        found = f"{len(shared)} of {len(turns)} held-out turns are trained on too"
        fix = "give each conversation one row, or a validation set"
        logger.warning(f"data.loss_on=all: {found}, in rows that begin alike: {fix}")


def connected_keys(keys: Sequence[str], texts: Sequence[Sequence[str]]) -> list[str]:
    """Return the first key of each row's component, rows with a text in common being connected.

    The first, so that rows that are added behind move none of the others, unless they connect two
    components: then the later one goes with the earlier one.

    This is for pairs that imply their prompt: two pairs of one question imply different prompts
    where the sides begin alike, but a response that both have shows it.

    Args:
        keys: key of each row.
        texts: texts of each row; a row without texts keeps its key.
    """
    parents = {key: key for key in keys}
    order = {key: place for place, key in enumerate(parents)}

    def root(key: str) -> str:
        while parents[key] != key:
            parents[key] = key = parents[parents[key]]
        return key

    seen: dict[str, str] = {}
    for key, own in zip(keys, texts, strict=True):
        for text in own:
            roots = root(key), root(seen.setdefault(text, key))
            parents[max(roots, key=order.__getitem__)] = min(roots, key=order.__getitem__)
    return [root(key) for key in keys]


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `total` and lie within 1 of `total * weight`."""
    counts = [int(total * w) for w in weights]
    remainders = [total * w - c for w, c in zip(weights, counts, strict=True)]
    by_remainder = sorted(range(len(weights)), key=lambda i: -remainders[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
