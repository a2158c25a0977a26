"""The former place of `text/tokenizers.py`, for programs that import from here."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Return a name of `rlhf_lightning.text.tokenizers`."""
    return getattr(importlib.import_module("rlhf_lightning.text.tokenizers"), name)
