"""The date that a chat template writes: one for all days, so that tokens do not depend on today."""

from __future__ import annotations

import json
import re
from datetime import datetime

# The date that Llama's templates write where none is given.
DATE = "26 Jul 2024"
_CODES = ("%d", "%b", "%B", "%m", "%Y", "%y", "%a", "%A", "%H", "%M", "%S")
_SETTING = re.compile(r"\{%- set (\w+) = (.*?) %\}")


def with_fixed_date(template: str, date_string: str | None = None) -> str:
    """Return the template with `date_string` and `strftime_now` of one day in front of it.

    A template that reads neither, or has a date in front already, stays as it is.

    Args:
        template: the chat template, Jinja source.
        date_string: the date, as in "26 Jul 2024", which is the default.

    Raises:
        ValueError: if another date is written there, or the date cannot be read.
    """
    if re.search(r"\b(?:date_string|strftime_now)\b", template) is None:
        return template
    known = leading_settings(template).get("date_string")
    if known is not None:
        if date_string is not None and json.dumps(date_string) != known:
            raise ValueError(
                f"date_string={date_string!r}, but the stage before wrote {known} into the chat "
                "template: give the same, or start from the original checkpoint"
            )
        return template
    written = DATE if date_string is None else date_string
    try:
        day = datetime.strptime(written, "%d %b %Y")
    except ValueError:
        raise ValueError(f"date_string={written!r} is no date: write it as {DATE!r}") from None
    codes = "".join(f" | replace('{code}', '{day.strftime(code)}')" for code in _CODES)
    return (
        f"{{%- set date_string = {json.dumps(written)} %}}"
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
