"""Under which licence a model's base stands, and what the base is called on the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, metadata_load

UNKNOWN = "unknown"
_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")
# How the usual texts begin, and the hub's word for them.
_TEXTS = (
    (r"Apache License\s+Version 2\.0", "apache-2.0"),
    (r"\bMIT License\b", "mit"),
    (r"BSD 3-Clause", "bsd-3-clause"),
    (r"LLAMA 2 COMMUNITY LICENSE", "llama2"),
    (r"META LLAMA 3 COMMUNITY LICENSE", "llama3"),
    (r"LLAMA 3\.1 COMMUNITY LICENSE", "llama3.1"),
    (r"LLAMA 3\.2 COMMUNITY LICENSE", "llama3.2"),
    (r"LLAMA 3\.3 COMMUNITY LICENSE", "llama3.3"),
    (r"Gemma Terms of Use", "gemma"),
)
_SNAPSHOT = re.compile(r"/models--([\w.-]+)/snapshots/([0-9a-f]{40})/?$")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Licence:
    """A licence and who says so.

    Args:
        identifier: the hub's word for it, "other", or "unknown".
        reason: where it is written, or why it is not known.
    """

    identifier: str
    reason: str


def base_licence(configured: str | None, base: str | None) -> Licence:
    """Return the licence of the model that training started from.

    Asked are, in this order, the configuration, the front matter of the base's model card, and the
    base's licence file. Nothing is guessed.

    Args:
        configured: `model.license` of the configuration.
        base: folder or hub name; None for random weights.
    """
    if configured is not None:
        return Licence(str(configured), "as the configuration of the model says")
    if base is None:
        return Licence(UNKNOWN, "the weights began at random: who trained them decides")
    card, problem = _card(base)
    if card.get("license"):
        found = card["license"]
        word = str(found[0] if isinstance(found, list) else found)
        name = f", by the name of {card['license_name']}" if card.get("license_name") else ""
        if word != UNKNOWN:
            return Licence(word, f"as the model card of the base says{name}")
        return Licence(UNKNOWN, "the model card of the base does not know it")
    for name in _FILES:
        path = Path(base) / name
        if path.is_file():
            return Licence(_recognised(path), f"as the file {name} of the base says")
    return Licence(UNKNOWN, problem or "the base has no model card and no licence file")


def hub_base(base: str | None, configured: str | None = None) -> str | None:
    """Return the hub name of the model at the root of `base`, or None if it is not known.

    Args:
        base: folder or hub name; a folder's model card may name it.
        configured: `model.source` of the configuration, for a folder whose card does not.
    """
    if base is None:
        return None
    if Path(base).is_dir():
        named = _card(base)[0].get("base_model") or configured
        named = named[0] if isinstance(named, list) else named
        return str(named) if named and _is_hub_name(str(named)) else None
    return base if _is_hub_name(base) else None


def hub_snapshot(folder: str | Path) -> tuple[str, str] | None:
    """Return hub name and commit of a folder in the hub's cache, None of any other folder.

    Only there it is certain that a folder holds what stands on the hub: a copy elsewhere may have
    been trained further.
    """
    found = _SNAPSHOT.search(Path(folder).expanduser().absolute().as_posix())
    return None if found is None else (found.group(1).replace("--", "/"), found.group(2))


def _is_hub_name(text: str) -> bool:
    return _HUB_NAME.fullmatch(text) is not None and not Path(text).is_dir()


def _card(base: str) -> tuple[dict[str, Any], str | None]:
    """Return the front matter of a model card, and why there is none."""
    path = Path(base) / "README.md"
    if not Path(base).is_dir():
        try:
            path = Path(hf_hub_download(base, "README.md", etag_timeout=5))
        except Exception as error:  # a card that cannot be read must not end a finished training
            return {}, f"the model card of {base} could not be read ({type(error).__name__})"
    if not path.is_file():
        return {}, None
    try:
        return metadata_load(path) or {}, None
    except Exception as error:  # of the YAML in it, among others
        return {}, f"the model card of {base} could not be read ({type(error).__name__})"


def _recognised(path: Path) -> str:
    head = path.read_text(encoding="utf-8", errors="replace")[:3000]
    found = [word for pattern, word in _TEXTS if re.search(pattern, head, re.IGNORECASE)]
    return found[0] if found else "other"
