"""Text into HTML that shows it and cannot do anything else."""

from __future__ import annotations

import html
import re

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def text(value: object) -> str:
    """Return any value as text, escaped for an element or a quoted attribute.

    Control characters, which HTML forbids, become visible pictures of themselves.
    """
    plain = str(value).encode("utf-8", "replace").decode("utf-8")
    return html.escape(_CONTROL.sub(_picture, plain), quote=True)


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    return chr(0x2400 + code) if code < 0x20 else "\ufffd"
