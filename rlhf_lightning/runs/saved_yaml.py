"""YAML of a run folder, read as data: plain values, no aliases, limited in size and depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rlhf_lightning.runs.reading import read_file

MOST_BYTES = 2**20
MOST_LEVELS = 20


class _PlainLoader(yaml.SafeLoader):
    """Loads mappings, lists, texts, numbers, truth values and null."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node; refuse an alias, which may stand for a thousand others, and depth."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1} has an alias")
        self.depth += 1
        if self.depth > MOST_LEVELS:
            raise yaml.YAMLError(f"it is nested more than {MOST_LEVELS} levels deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag in ("binary", "timestamp", "set", "omap", "pairs"):
    _PlainLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", yaml.SafeLoader.construct_undefined)  # type: ignore[type-var]


def read_yaml(file: Path) -> Any:
    """Return what a file holds.

    Raises:
        ValueError: if it is too large, too deep, has an alias or anything but plain values.
        OSError: if it cannot be read.
    """
    content = read_file(file, most=MOST_BYTES)
    try:
        loader = _PlainLoader(content.decode("utf-8"))
        return loader.get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
