"""What a fit that was rolled back leaves for the one that starts again, in the run folder.

The checkpoint that training goes back to was written before the illness and knows nothing of it;
those that know are dropped. A file beside it tells the new fit, and a run that is resumed because a
kill came before that fit had saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.doctor_log import DoctorEvent, event_from
from rlhf_lightning.runs.folder import RunFolder


@dataclass(frozen=True)
class Handover:
    """What the next fit takes over.

    Args:
        checkpoint: iteration of the checkpoint that it starts from.
        rollbacks: made so far.
        held: what the rollback before this one set, by control.
        events: everything that was said and done so far.
    """

    checkpoint: int
    rollbacks: int
    held: Mapping[str, float]
    events: tuple[DoctorEvent, ...]


def write_handover(folder: RunFolder, handover: Handover) -> None:
    """Write it in one step, in the place of that of an earlier rollback."""
    write_text(_path(folder), json.dumps(asdict(handover)))


def read_handover(folder: RunFolder) -> Handover | None:
    """Return that of the last rollback of a run; None if there was none.

    Raises:
        ValueError: if the file is damaged.
    """
    path = _path(folder)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        events = tuple(event_from(event) for event in content.pop("events"))
        return Handover(**content, events=events)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}, in which a rollback of the doctor stands, is damaged ({error}): restore it, "
            "or remove it to go on without what the rollback changed"
        ) from error


def _path(folder: RunFolder) -> Path:
    return folder.checkpoints / "rollback.json"
