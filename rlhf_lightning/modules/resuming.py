"""What a checkpoint remembers of the models that are rebuilt from their source."""

from __future__ import annotations

from typing import Any

KEY = "reference_fingerprint"


def note_fingerprint(checkpoint: dict[str, Any], fingerprint: str) -> None:
    """Add the fingerprint of the frozen source to a checkpoint."""
    checkpoint[KEY] = fingerprint


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
