"""A configuration as it may leave the machine: no folders, no secrets (told by their keys)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REMOVED = "<removed>"
_LEFT_OUT = ("ckpt_path", "hydra", "logger", "paths", "resume")
_SECRET = re.compile(
    r"(^|[_-])(api[_-]?key|authorization|cookies?|credentials?|headers?|secrets?"
    r"|(access|private|secret)_?key|(access|auth|bearer|hf|hub|wandb|github|session)_?token)$"
    r"|pass(word|wd|phrase)s?$|^token$",
    re.IGNORECASE,
)
_USER = re.compile(r"(?<=://)[^\s/@]*@")  # name and password in an address
_PART = r"(?:[^/\\\s'\",:;{}]+[/\\])"
# Not in the middle of a relative path or of an address.
_FOLDERS = re.compile(
    rf"(?<![\w./:\\~}})>\]])(?:~/{_PART}*|(?:[A-Za-z]:)?[/\\]{_PART}+)(?=[^/\\\s])"
)


def is_secret(key: str) -> bool:
    """Return whether the last part of a key, or the name of a variable, names a secret."""
    return _SECRET.search(key) is not None


def public_config(config: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without what concerns one machine or one person.

    Left out are where things are kept and logged (`paths`, `logger`, ...), secrets (by their keys)
    and, of an absolute path, all but its last part. What was read from the environment stays as it
    was written.

    Args:
        config: plain dicts and lists, interpolations resolved.
        written: the same with its interpolations.
    """
    kept = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    return dict(_public("", kept, written))


def public_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, KEY=VALUE, without secrets and folders."""
    parts = (word.partition("=") for word in words)
    return [
        f"{key}={REMOVED}" if name_secrets([key]) else f"{key}{sign}{_public('', value, None)}"
        for key, sign, value in parts
    ]


def name_secrets(words: Sequence[str]) -> bool:
    """Return whether a key of a command line, or one above it, names a secret."""
    return any(is_secret(part) for word in words for part in word.partition("=")[0].split("."))


def without_folders(text: str) -> str:
    """Return `text` with every absolute path cut to its last part."""
    text = text.removeprefix("file://")
    if text.startswith(("/", "~")) and not re.search(r"\s[/~]", text):  # a path and nothing else
        return f".../{text.rstrip('/~').rpartition('/')[2]}"
    return _FOLDERS.sub(".../", text)


def _public(key: str, value: Any, written: Any) -> Any:
    if value not in (None, "", {}, []) and is_secret(key):
        return REMOVED
    if isinstance(value, Mapping):
        below = written if isinstance(written, Mapping) else {}
        return {str(k): _public(str(k), v, below.get(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        parts = written if isinstance(written, list) else [None] * len(value)
        return [_public("", *pair) for pair in zip(value, parts, strict=False)]
    if not isinstance(value, str):
        return value
    if isinstance(written, str) and "${oc.env:" in written and value:
        return written
    return _USER.sub("", value) if "://" in value else without_folders(value)
