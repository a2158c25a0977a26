"""`.hydra/changes.json`: what the user has set, where it is not as the experiment is shipped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import RunFolder, to_json
from rlhf_lightning.runs.public_config import public_config
from rlhf_lightning.runs.reading import parse

ABSENT = "not set"


@dataclass(frozen=True)
class Change:
    """One value that differs from the default.

    Args:
        key: the key as written on the command line.
        default: the value as it is shipped, as text.
        value: the value in the run, as text.
    """

    key: str
    default: str
    value: str


def find_changes(
    keys: Iterable[str], default: Mapping[str, Any], config: Mapping[str, Any]
) -> list[Change]:
    """Return the values of `config` that a user has set and that differ, without secrets.

    Args:
        keys: dotted keys of values and groups that the user named, in their order.
        default: the configuration as it is shipped; plain values.
        config: the configuration of the run, in the same form.
    """
    old, new = (dict(flatten(public_config(c, c))) for c in (default, config))
    asked = [
        found
        for key in dict.fromkeys(keys)
        for found in dict.fromkeys((*new, *old))
        if found == key or found.startswith(f"{key}.")
    ]
    return [
        Change(key, show(before), show(after))
        for key in asked
        if (before := _value(old, key)) != (after := _value(new, key))
        and not (_says_nothing(before) and _says_nothing(after))
        # A group in place of a value, or the other way round: its keys, or that key, say it.
        and not (_is_group(old, key) or _is_group(new, key))
    ]


def _value(flat: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, or of the group around it where that is one value, as null is."""
    while key not in flat and "." in key:
        key = key.rpartition(".")[0]
    return flat.get(key, ABSENT)


def _says_nothing(value: Any) -> bool:
    return value is None or value == ABSENT


def _is_group(flat: Mapping[str, Any], key: str) -> bool:
    return any(other.startswith(f"{key}.") for other in flat)


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of each leaf; a list is one."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def show(value: Any) -> str:
    """Return a value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def write_changes(folder: RunFolder, changes: list[Change]) -> None:
    """Keep the changes with the configuration of the run."""
    path = folder.config.with_name("changes.json")
    write_text(path, to_json([asdict(change) for change in changes], indent=2) + "\n")


def read_changes(folder: RunFolder) -> list[Change] | None:
    """Return the changes of a run, None if they were never looked for."""
    path = folder.config.with_name("changes.json")
    if not path.is_file():
        return None
    try:
        return parse(list[Change], path.read_bytes())
    except ValueError:
        return None
