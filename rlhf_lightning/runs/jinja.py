"""Templates of jinja2, as every page and card of ours reads them."""

from __future__ import annotations

from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined


def environment(loader: BaseLoader, **how: Any) -> Environment:
    """Return an environment in which unknown names are errors and blocks leave no lines."""
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=loader, undefined=StrictUndefined, **blocks, **how)
