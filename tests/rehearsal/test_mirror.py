"""The second device itself: what it refuses."""

from __future__ import annotations

from typing import Any

import torch

from tests.builders.mirror import MirrorTensor, on_mirror

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
