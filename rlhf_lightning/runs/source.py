"""A model's folder or hub name, and the model that was there when it was resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rlhf_lightning.runs.manifest import ManifestError, source_fingerprint


@dataclass(frozen=True)
class Source:
    """A folder or hub name, and the model that was there when it was first read.

    Args:
        name: folder or hub name.
        fingerprint: result of `source_fingerprint`.
        key: configuration key that names it, for the message.
        revision: branch, tag or commit of a hub name.
    """

    name: str
    fingerprint: str
    key: str = "source"
    revision: str | None = None

    @classmethod
    def of(cls, name: str | Path, key: str = "source", revision: str | None = None) -> Self:
        """Return the source as it is now."""
        return cls(str(name), source_fingerprint(str(name), revision), key, revision)

    def state_dict(self) -> dict[str, Any]:
        """Return the fingerprint, for a checkpoint."""
        return {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare it with that of a checkpoint.

        Raises:
            ValueError: if the checkpoint was trained with another model.
        """
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"the checkpoint was trained with {self.key} {state['fingerprint'][:12]}, and "
                f"{self.key}={self.name} is {self.fingerprint[:12]}: give the same {self.key}"
            )

    def check(self) -> None:
        """Check that the model which is loaded now is the one that was resolved.

        Raises:
            ManifestError: if another one was put in its place.
        """
        now = source_fingerprint(self.name, self.revision)
        if now != self.fingerprint:
            raise ManifestError(
                f"{self.key}={self.name} is another model now ({now[:12]}) than the one that was "
                f"read at the start ({self.fingerprint[:12]}): put that one back and run the "
                "command again (a run with resume=auto), or start a new run"
            )
