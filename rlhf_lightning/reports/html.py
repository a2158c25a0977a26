"""HTML from the templates of this folder; every value that is not HTML already is escaped."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rlhf_lightning.runs.folder import from_here
from rlhf_lightning.runs.metric_catalog import counted, duration, number, percent

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def text(value: object) -> Markup:
    """Return any value as text, escaped for an element or a quoted attribute.

    Control characters, which HTML forbids, become visible pictures of themselves.
    """
    return escape(_printable(value))


def render(template: str, **context: Any) -> Markup:
    """Return a template of `templates/` as HTML."""
    return Markup(_TEMPLATES.get_template(template).render(context))


def _printable(value: object) -> str:
    if isinstance(value, Markup):
        return value
    shown = str(value).encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(lambda one: chr(0x2400 + ord(one[0])) if one[0] < " " else "\ufffd", shown)


_TEMPLATES = Environment(
    loader=PackageLoader("rlhf_lightning.reports"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_printable,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "counted": counted,
    "duration": duration,
    "from_here": from_here,
    "number": number,
    "percent": percent,
}
