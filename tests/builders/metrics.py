"""Whether docs/metrics.md explains a metric."""

from __future__ import annotations

from fnmatch import fnmatchcase

from rlhf_lightning.runs.metric_catalog import FAMILIES, QUANTITIES, whole_key


def is_known(name: str) -> bool:
    """Return whether the page explains a metric of this name."""
    plain = whole_key(name)
    if plain != name and is_known(plain):
        return True
    plain = plain.removesuffix("_low").removesuffix("_high")
    return plain in QUANTITIES or any(
        fnmatchcase(one, family) for one in (name, plain) for family in FAMILIES
    )
