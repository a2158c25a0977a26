"""Secrets stay out of what a run writes: its saved configuration, its logs, its summary, W&B.

A secret is recognised by its key (`api_key`, `password`, `hf_token`) or its form (`hf_...`).
Behind its key it is removed where it stands, however short it is. What was found once is removed
from every later text too, unless it is a number, a plain word or so short that it occurs by chance.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf_lightning.runs.atomic import write_text

REMOVED = "<removed>"
SHORTEST = 6  # a shorter text occurs by chance

_KEY = re.compile(
    r"(^|[_-])(api_?key|api-key|authorization|cookies?|credentials?|headers?|pass"
    r"|secrets?|(access|private|secret|signing|encryption)_?key)$|pass(word|wd|phrase)s?$"
    r"|(^|[_-])(access|auth|bearer|hf|hub|wandb|github|session|refresh)_?token$|^token$",
    re.IGNORECASE,
)
# Such keys name a column or a place as often as a secret: the value decides.
_PERHAPS_KEY = re.compile(r"(^|[_-])(key|token)$", re.IGNORECASE)
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9_\-.+/=]{16,}")
_VERSION_KEY = re.compile(r"revision|commit|sha|hash|fingerprint|version", re.IGNORECASE)
_HEX_40 = re.compile(r"[0-9a-f]{40}")  # the form of a W&B key, and of a commit
_FORM = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abeprs]-[\w-]{10,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bnvapi-[\w-]{20,}|(?<=[Bb]earer )[\w\-.+/=]{8,}|\bAIza[\w-]{35}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"  # a JSON web token
    r"|(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_ASSIGNED = re.compile(
    r"(?<![\w.\-@/])(?P<key>[\w.\-@/]++)(?=(?P<is>['\"]?[ \t]*[=:][ \t]*)"
    r"(?P<value>\$\{[^}]*\}|\{[^}]*\}|\[[^\]]*\]|'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\""
    r"|(?:(?:[Bb]asic|[Bb]earer|[Dd]igest|[Tt]oken) )?+[^\s'\",}\]]+))"
)
_PROSE = re.compile(r"\w ")  # `the stop token: 2`: a sentence, no assignment
_COMMON = re.compile(r"[-+.\d_]*(e[-+]?\d+)?|[a-z]{1,12}", re.IGNORECASE)
_EMPTY = re.compile(r"[-+]?[.\d][.\d_]*(e[-+]?\d+)?|true|false|null|none|\{\}|\[\]", re.I)
_UNMISTAKABLE = 16  # characters; a shorter secret may be a part of another word
_INTERPOLATION = re.compile(r"\$\{.*\}")
_known: set[str] = set()


def is_secret(key: str, value: Any) -> bool:
    """Return whether the value of a configuration's key is to be kept secret.

    Args:
        key: the last part of its name.
        value: the value at the key; an interpolation is no secret, but its target may be one.
    """
    if value is None or value == "" or isinstance(value, bool | int | float):
        return False
    if isinstance(value, str) and (_INTERPOLATION.fullmatch(value) or value == "???"):
        return False
    if _KEY.search(key):
        return True
    if not isinstance(value, str):
        return False
    if _PERHAPS_KEY.search(key) and _RANDOM.fullmatch(value):
        return True
    return bool(_HEX_40.fullmatch(value)) and not _VERSION_KEY.search(key)


def learn_secrets(*containers: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Remember the secrets of configurations and of the environment, for `redacted`.

    Args:
        containers: plain dicts and lists.
        environment: variables; of those whose names say so the values.
    """
    found = [text for container in containers for text in _secret_values("", container)]
    found += [value for name, value in environment.items() if is_secret(name, value)]
    for text in found:
        if len(text) >= SHORTEST and not _COMMON.fullmatch(text):
            # As a traceback or a JSON file writes it, too.
            escaped = (
                json.dumps(text),
                json.dumps(text, ensure_ascii=False),
                repr(text),
                ascii(text),
            )
            _known.update({text, *(each[1:-1] for each in escaped)})


def redacted(text: str) -> str:
    """Return `text` with every known secret, and everything of a secret's form, removed.

    The value of an assignment to a secret's key (`api_key=...`) is removed where it stands.
    """
    for secret in sorted(_known, key=len, reverse=True):
        if secret in text:
            whole = re.escape(secret)
            if len(secret) < _UNMISTAKABLE:
                whole = rf"(?<!\w){whole}(?!\w)"
            text = re.sub(whole, REMOVED, text)
    text = _FORM.sub(REMOVED, text)
    parts, end = [], 0
    for found in _ASSIGNED.finditer(text):
        start, stop = found.span("value")
        if start >= end and _is_assigned_secret(found, text):
            quoted = text[start] in "'\""
            parts += [text[end : start + quoted], REMOVED]
            end = stop - quoted
    return "".join(parts) + text[end:]


def _is_assigned_secret(found: re.Match[str], text: str) -> bool:
    key, value = found["key"].rpartition(".")[2], found["value"].strip("'\"")
    before = text[max(found.start() - 2, 0) : found.start()]
    if found["is"].endswith(": ") and _PROSE.fullmatch(before):
        return bool(_RANDOM.fullmatch(value)) and is_secret(key, value)
    return value != REMOVED and not _EMPTY.fullmatch(value) and is_secret(key, value)


def without_secrets(key: str, value: Any) -> Any:
    """Return a configuration's value with its secrets removed, at every depth."""
    if is_secret(key, value):
        return REMOVED
    if isinstance(value, Mapping):
        return {k: without_secrets(str(k), item) for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets("", item) for item in value]
    return redacted(value) if isinstance(value, str) else value


def redact_files(*files: Path) -> None:
    """Remove the secrets from YAML files that other code has written, each where it stands."""
    for file in files:
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="surrogateescape")
            if (clean := redacted_yaml(text)) != text:
                write_text(file, clean)


def redacted_yaml(text: str) -> str:
    """Return the text of a YAML file with its secrets removed, each where it stands."""
    try:
        places = list(_secret_places("", yaml.compose(text, Loader=yaml.SafeLoader)))
    except yaml.YAMLError:
        return redacted(text)
    for node, clean in sorted(places, key=lambda place: -place[0].start_mark.index):
        content = REMOVED if clean == REMOVED else json.dumps(clean, ensure_ascii=False)
        content += "\n" * (node.style in ("|", ">"))  # such a text ends behind its line
        text = text[: node.start_mark.index] + content + text[node.end_mark.index :]
    return text


def _secret_places(
    key: str, node: yaml.Node | None, *, inside: bool = False
) -> Iterator[tuple[yaml.Node, str]]:
    """Yield the scalars that hold a secret, with what takes their place."""
    if isinstance(node, yaml.MappingNode):
        inside = inside or is_secret(key, node.value)
        for name, value in node.value:
            yield from _secret_places(str(name.value), value, inside=inside)
    elif isinstance(node, yaml.SequenceNode):
        inside = inside or is_secret(key, node.value)
        for value in node.value:
            yield from _secret_places("", value, inside=inside)
    elif isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
        clean = REMOVED if inside or is_secret(key, node.value) else redacted(node.value)
        if clean != node.value:
            yield node, clean


class RedactingFilter(logging.Filter):
    """Removes secrets from log records, before they reach a handler's file or console."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let the record pass, without secrets."""
        message = record.getMessage()
        if (clean := redacted(message)) != message:
            record.msg, record.args = clean, ()
        return True


def redact_logs() -> None:
    """Put a `RedactingFilter` on the handlers of the root logger."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(each, RedactingFilter) for each in handler.filters):
            handler.addFilter(RedactingFilter())


def _secret_values(key: str, value: Any, *, inside: bool = False) -> Iterator[str]:
    """Yield the texts that are secret; below a secret key all are."""
    inside = inside or is_secret(key, value)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secret_values(str(name), item, inside=inside)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secret_values("", item, inside=inside)
    elif inside and isinstance(value, str):
        yield value
