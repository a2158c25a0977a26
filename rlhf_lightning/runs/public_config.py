"""A configuration as it may leave the machine: no folders, no secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rlhf_lightning.runs.secrets import REMOVED, is_secret, redacted

_LEFT_OUT = ("ckpt_path", "hydra", "logger", "paths", "resume")
_PART = r"[^/\\\s'\",:;{}]+[/\\]"
_START = r"(?<![\w./:\\~})>\]])"  # not in the middle of a relative path or of an address
_FOLDERS = re.compile(
    rf"{_START}(?:~/(?:{_PART})*|/(?:{_PART})+|[A-Za-z]:[/\\](?:{_PART})+)(?=[^/\\\s])"
)
_ENVIRONMENT = "${oc.env:"


def public_config(config: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without what concerns one machine or one person.

    Left out are where things are kept and logged (`paths`, `logger`, ...). Of an
    absolute path its last part stays. What was read from the environment stays as it was written;
    keys, passwords, headers and what an address holds of them are removed.

    Args:
        config: plain dicts and lists, interpolations resolved.
        written: the same with its interpolations.
    """
    private = _from_environment(config, written)
    kept = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    return {str(key): _public(str(key), value, private) for key, value in kept.items()}


def without_folders(text: str) -> str:
    """Return `text` with every absolute path cut to its last part."""
    text = text.removeprefix("file://")
    if text.startswith(("/", "~")) and not re.search(r"\s[/~]", text):  # a path and nothing else
        return f".../{text.rstrip('/~').rpartition('/')[2]}"
    return _FOLDERS.sub(".../", text)


def _public(key: str, value: Any, private: dict[str, str]) -> Any:
    if value not in ({}, []) and is_secret(key, value):
        return REMOVED
    if isinstance(value, Mapping):
        return {str(k): _public(str(k), v, private) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_public("", item, private) for item in value]
    if not isinstance(value, str):
        return value
    for secret, interpolation in private.items():
        if value == secret or (len(secret) >= 8 and secret in value):
            return interpolation
    clean = redacted(value)
    return _without_credentials(clean) if "://" in clean else without_folders(clean)


def _without_credentials(address: str) -> str:
    try:
        parts = urlsplit(address)
    except ValueError:
        return REMOVED
    if parts.scheme == "file":
        return without_folders(address)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, REMOVED if parts.query else "", ""))


def _from_environment(config: Any, written: Any) -> dict[str, str]:
    """Return value -> interpolation of what was read from environment variables."""
    if isinstance(written, str):
        return {str(config): written} if _ENVIRONMENT in written and config != "" else {}
    found: dict[str, str] = {}
    if isinstance(written, Mapping) and isinstance(config, Mapping):
        for key, value in written.items():
            found |= _from_environment(config.get(key), value)
    elif isinstance(written, list) and isinstance(config, list):
        for one, other in zip(config, written, strict=False):
            found |= _from_environment(one, other)
    return found
