"""Bytes as people write them."""

from __future__ import annotations

import re

KIB, MIB, GIB = 2**10, 2**20, 2**30
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 2**40}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | float) -> int:
    """Return the bytes of `80GiB`, `24 GB` or a plain number.

    Raises:
        ValueError: if it is no size.
    """
    found = _PATTERN.fullmatch(str(text))
    unit = None if found is None else _UNITS.get(found.group(2).upper())
    size = 0 if found is None or unit is None else round(float(found.group(1)) * unit)
    if size <= 0:
        raise ValueError(f"{text!r} is no size: write 80GiB, 24GB or a number of bytes")
    return size


def gib(size: int) -> str:
    """Return `1.25` for a size in GiB, two digits behind the point."""
    return f"{size / GIB:,.2f}"


def readable(size: int) -> str:
    """Return `1.25 GiB`, or `300 MiB` below one."""
    return f"{size / MIB:,.0f} MiB" if abs(size) < GIB else f"{gib(size)} GiB"
