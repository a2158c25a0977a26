"""A text of a record: plain, or a conversation."""

from __future__ import annotations

from collections.abc import Mapping

Messages = tuple[Mapping[str, str], ...]
Text = str | Messages
