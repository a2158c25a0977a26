"""The date that a chat template writes: one for all days, so that tokens do not depend on today."""

from __future__ import annotations

import json
import re
from datetime import datetime

# The date that Llama's templates write where none is given.
DATE = "26 Jul 2024"
_CODES = ("%d", "%b", "%B", "%m", "%Y", "%y", "%a", "%A", "%H", "%M", "%S")
_SETTING = re.compile(r"\{%- set (\w+) = (.*?) %\}")


def with_fixed_date(template: str, date: str = DATE) -> str:
    """Return the template with `date_string` and `strftime_now` of one day in front of it.

    A template that reads neither, or has a date in front already, stays as it is.

    Args:
        template: the chat template, Jinja source.
        date: the date, as in "26 Jul 2024".

    Raises:
        ValueError: if the date cannot be read.
    """
    reads = re.search(r"\b(?:date_string|strftime_now)\b", template) is not None
    if not reads or "date_string" in leading_settings(template):
        return template
    try:
        day = datetime.strptime(date, "%d %b %Y")
    except ValueError:
        raise ValueError(f"date_string={date!r} is no date: write it as {DATE!r}") from None
    codes = "".join(f" | replace('{code}', '{day.strftime(code)}')" for code in _CODES)
    return (
        f"{{%- set date_string = {json.dumps(date)} %}}"
        f"{{%- macro strftime_now(format) %}}{{{{ format{codes} }}}}{{% endmacro %}}{template}"
    )


def leading_settings(template: str) -> dict[str, str]:
    """Return the variables that a template sets before anything else, with what they are set to."""
    found: dict[str, str] = {}
    at = 0
    while (setting := _SETTING.match(template, at)) is not None:
        found[setting.group(1)] = setting.group(2)
        at = setting.end()
    return found
