"""Local files that a run's settings name: a later command reads only unchanged ones.

A run folder may come from someone else, whose settings may name any file of the user. Only a run
that has read a private file knows its SHA-256, so that nothing else is read again.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rlhf_lightning.app.config.compose import at
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import Node, nodes, parameters
from rlhf_lightning.runs.manifest import ManifestError, content_digest

GROUPS = ("model", "dataset", "scorer", "safety", "evaluation")  # that a later command reads
UNREADABLE = (ManifestError, OSError, ValueError, TypeError)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class Named(NamedTuple):
    """A value of the settings that names local files.

    Args:
        place: place in the configuration.
        value: value at that place.
        paths: files, or the folder of a model.
    """

    place: str
    value: object
    paths: Iterable[Path]


def digests_of(settings: TrainSettings) -> dict[str, tuple[str, ...]]:
    """Return the digests of what settings name, by its place; for `Summary.read`."""
    found = {}
    for place, _, paths in local_files(settings):
        with suppress(*UNREADABLE):  # loading it raises the error
            found[place] = tuple(content_digest(path) for path in paths)
    return found


def local_files(settings: TrainSettings) -> Iterator[Named]:
    """Yield what settings name that is on this machine."""
    for place in ("artifacts.base", "artifacts.sft", "model.chat_template"):
        yield from _existing(place, settings.select(place))
    for where, target in settings.targets().items():
        if where.partition(".")[0] in GROUPS:
            for node in nodes(target.read(where)):
                yield from _of_source(node) if _is_source(node.call) else _of_call(node)


def _is_source(call: Any) -> bool:
    records = getattr(call, "records", None)
    return records is not None and "kind" in inspect.signature(records).parameters


def _of_call(node: Node) -> Iterator[Named]:
    """Yield the arguments of a call that may be paths, by their annotations."""
    hints = parameters(node.call)
    for key, value in node.arguments.items():
        if _takes_path(hints[key]):
            yield from _existing(f"{node.where}.{key}", value)


def _of_source(node: Node) -> Iterator[Named]:
    """Yield the files that a source of records reads, by the argument that names them."""
    # brings torch: a mistake on the command line is reported before
    from rlhf_lightning.data.identity import files_of

    for key, value in node.arguments.items():
        for named in _existing(f"{node.where}.{key}", value):
            given = set(named.paths)
            files = (f for f in files_of(node.make()) if not given.isdisjoint((f, *f.parents)))
            yield named._replace(paths=files)


def _takes_path(hint: Any) -> bool:
    return hint is Path or any(map(_takes_path, get_args(hint)))


def _existing(place: str, value: object) -> Iterator[Named]:
    """Yield a place whose value is a path that is there, or a list with some."""
    texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
    if found := [Path(one) for one in map(os.path.expanduser, texts) if os.path.exists(one)]:
        yield Named(place, value, found)


def is_unchanged(paths: Iterable[Path], digests: Sequence[str]) -> bool:
    """Return whether files are those that a run has read; the first other one ends it."""
    left = Counter(digests)
    for path in paths:
        if not left.total():  # a file that the run did not read is not opened
            return False
        left[digest := content_digest(path)] -= 1
        if left[digest] < 0:
            return False
    return not left.total()


def written_keys(written: Mapping[str, Any], place: str) -> list[str]:
    """Return a place of a configuration, and the keys that it refers to, one to the next."""
    keys, value = [place], at(written, place)
    while isinstance(value, str) and (found := _REFERENCE.fullmatch(value)) is not None:
        keys.append(found[1])
        value = at(written, found[1])
    return keys
