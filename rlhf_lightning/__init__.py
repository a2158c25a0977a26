"""RLHF as plain LightningModules: supervised fine-tuning, reward modelling, DPO, PPO, GRPO."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# Public names and their modules, from the stub that type checkers read too. They are imported when
# they are asked for, as torch takes seconds.
_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
__all__ = sorted(_HOMES)

_EXAMPLES = ("ArgumentPairSource", "LabelledTextSource", "QuestionSource", "sentiment_gold")
_WITHDRAWN = {  # what is written instead
    "TranscriptSource": "HubSource(NAME), which reads transcripts as conversations",
    "VllmServerGenerator": "VllmGenerator(..., python=PYTHON)",
    **{name: f"from examples.datasets, in a checkout, import {name}" for name in _EXAMPLES},
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        instead = _WITHDRAWN.get(name)
        told = f": write {instead}" if instead else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{told}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
