"""State of a module in its checkpoint, and the fingerprint of its frozen models' source."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from rlhf_lightning.distributed.collectives import rank

logger = logging.getLogger(__name__)
KEY = "reference_fingerprint"


class Stateful(Protocol):
    """State that changes during a run and is no parameter."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""


def say_changed(key: str, value: object, saved: object) -> None:
    """Say on the screen that a resumed run goes on with another value than the checkpoint's."""
    if rank() == 0:
        logger.warning(
            "%s=%s is asked for: it takes the place of the checkpoint's %s", key, value, saved
        )


def save_states(checkpoint: dict[str, Any], fingerprint: str, **parts: Stateful) -> None:
    """Add the fingerprint of the frozen source, and the state of each part by its name."""
    checkpoint[KEY] = fingerprint
    for name, part in parts.items():
        checkpoint[name] = part.state_dict()


def load_states(checkpoint: dict[str, Any], fingerprint: str, **parts: Stateful) -> None:
    """Give each part its state back.

    Raises:
        ValueError: if the source has changed since, or the checkpoint lacks a part.
    """
    check_fingerprint(checkpoint, fingerprint)
    for name, part in parts.items():
        if name not in checkpoint:
            raise ValueError(
                f"the checkpoint holds no {name}: it was written by another stage or version, "
                "start anew with resume=never"
            )
        part.load_state_dict(checkpoint[name])


def check_fingerprint(checkpoint: dict[str, Any], fingerprint: str) -> None:
    """Check that a run resumes from the source it started from.

    Raises:
        ValueError: if the source has changed since.
    """
    saved = checkpoint.get(KEY, "")
    if saved != fingerprint:
        raise ValueError(
            f"the checkpoint was trained against reference {saved[:12]}, the model's source is now "
            f"{fingerprint[:12]}: resume with the model it started from"
        )
