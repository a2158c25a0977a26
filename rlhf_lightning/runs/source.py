"""A model's folder that is read more than once: every read finds the same model, or fails."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from rlhf_lightning.runs.manifest import ManifestError, source_fingerprint

CallT = TypeVar("CallT", bound=Callable[..., Any])
MOST_READS = 100
_READ = (".json", ".safetensors", ".jinja", ".model", ".txt", ".py")


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
        """Check that the same model is still there.

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


def reads_one_model(call: CallT) -> CallT:
    """Decorate a function whose first argument is a model's folder, and that reads its files.

    If another model is put in its place meanwhile, the function is called again: the weights,
    config and tokenizer that it reads are those of one model.
    """
    first = next(iter(inspect.signature(call).parameters))

    @functools.wraps(call)
    def reading(*args: Any, **kwargs: Any) -> Any:
        folder = args[0] if args else kwargs.get(first)
        for _ in range(MOST_READS):
            before, found = _state(folder), None
            try:
                found = call(*args, **kwargs)
            except Exception:
                if _state(folder) == before:
                    raise
                continue
            if _state(folder) == before:
                return found
        raise ManifestError(
            f"{folder} was replaced {MOST_READS} times while it was read: stop what writes there, "
            "or copy the model to another folder"
        )

    return cast(CallT, reading)


def _state(folder: str | Path | None) -> object:
    """Return what differs once any file of a model in a folder is another one."""
    if folder is None or not Path(folder).is_dir():
        return None  # of the hub, whose files never change
    try:
        place = os.stat(folder)
        with os.scandir(folder) as entries:
            files = sorted(
                (e.name, s.st_ino, s.st_size, s.st_mtime_ns)
                for e in entries
                if e.name.endswith(_READ) and e.is_file() and (s := e.stat())
            )
    except OSError:  # it is replaced at this moment
        return time.monotonic_ns()
    return place.st_ino, place.st_ctime_ns, files
