"""The second device itself: what it refuses, and what it counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tests.builders.mirror import READ, WRITE, MirrorTensor, on_mirror, recorded

DEVICE = "mirror"


def refused(function: Any) -> str:
    try:
        function()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return "nothing"


def mixed() -> list[str]:
    here, there = torch.ones(3), torch.ones(3, device=DEVICE)
    assert isinstance(there, MirrorTensor)
    return [
        refused(lambda: there + here),
        refused(lambda: here[there.long()]),
        refused(lambda: torch.cat([here, there])),
        refused(lambda: torch.where(here > 0, there, there)),
        refused(lambda: there.numpy()),
        refused(lambda: there + torch.tensor(2.0)),  # a number of the host is allowed
        refused(lambda: there.copy_(here)),
    ]


def test_tensors_of_two_devices_in_one_operation_raise():
    *first, numpy, number, copied = on_mirror(mixed)
    assert all("same device" in message for message in first), first
    assert "numpy" in numpy
    assert (number, copied) == ("nothing", "nothing")


def counted() -> dict[str, Counter[str]]:
    x = torch.arange(6.0, device=DEVICE)
    host = torch.arange(6)
    cases = {
        "arithmetic": lambda: (x * 2 + 1).sum(),
        "item": lambda: x.sum().item(),
        "bool": lambda: bool((x > 0).all()),
        "tolist": x.tolist,
        "mask": lambda: x[x > 2],
        "masked write": lambda: x.clone().__setitem__(x > 2, 0.0),
        "nonzero": lambda: x.nonzero(),
        "cpu": lambda: x.cpu(),
        "index of the host": lambda: x[host],
        "upload": lambda: host.to(DEVICE),
        "upload without a wait": lambda: host.to(DEVICE, non_blocking=True),
        "a list": lambda: torch.tensor([1, 2], device=DEVICE),
        "gather": lambda: x.gather(0, x.long()),
        "repeats": lambda: x.repeat_interleave(x.long()),
    }
    found = {}
    for name, function in cases.items():
        with recorded() as log:
            function()
        found[name] = Counter({kind: log.count(kind=kind) for kind in (READ, WRITE)})
    return found


def test_reads_and_blocking_copies_are_counted_and_arithmetic_is_not():
    found = {name: dict(+count) for name, count in on_mirror(counted).items()}
    none = {name for name, count in found.items() if not count}
    writes = {name for name, count in found.items() if count == {WRITE: 1}}
    assert none == {"arithmetic", "upload without a wait", "gather"}
    assert writes == {"index of the host", "upload", "a list"}
    assert all(count == {READ: 1} for name, count in found.items() if name not in none | writes)
