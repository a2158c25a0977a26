"""The date that a chat template writes: one for all days, so that tokens do not depend on today."""

from __future__ import annotations

import json
import re
from datetime import date, datetime

# The date that Llama's templates write where none is given.
DATE = "26 Jul 2024"
_FORMS = ("%d %b %Y", "%d %B %Y", "%Y-%m-%d")
_READS = re.compile(r"\b(?:date_string|strftime_now)\b")
_CALL = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")
_SETTING = re.compile(r"\{%- set (\w+) = (.*?) %\}")


def with_fixed_date(template: str, date_string: str | None = None) -> str:
    """Return the template with the date written into it, or as it is where it writes none.

    `date_string` is set, and `strftime_now(FORMAT)` is replaced by the same day in that format.

    Args:
        template: the chat template, Jinja source.
        date_string: the date, as in "26 Jul 2024"; None for that one, or for the one that is
            written there already.

    Raises:
        ValueError: if another date is written there, the date cannot be read where a format is
            asked for, or the format is no text.
    """
    if not _READS.search(template):
        return template
    known = leading_settings(template).get("date_string")
    if known is not None:
        if date_string is not None and json.dumps(date_string) != known:
            raise ValueError(
                f"date_string={date_string!r}, but the stage before wrote {known} into the chat "
                "template: give the same, or start from the original checkpoint"
            )
        return template
    day = DATE if date_string is None else date_string
    written = _CALL.sub(lambda call: json.dumps(_parsed(day).strftime(call.group(2))), template)
    if re.search(r"\bstrftime_now\(", written):
        raise ValueError(
            "the chat template asks strftime_now for today's date in a format that is no text, so "
            "that its tokens would depend on the day: write the date into the template"
        )
    return f"{{%- set date_string = {json.dumps(day)} %}}{written}"


def leading_settings(template: str) -> dict[str, str]:
    """Return the variables that a template sets before anything else, with what they are set to."""
    found: dict[str, str] = {}
    at = 0
    while (setting := _SETTING.match(template, at)) is not None:
        found[setting.group(1)] = setting.group(2)
        at = setting.end()
    return found


def _parsed(day: str) -> date:
    for form in _FORMS:
        try:
            return datetime.strptime(day, form).date()
        except ValueError:
            continue
    raise ValueError(f"date_string={day!r} is no date: write it as {DATE!r}")
