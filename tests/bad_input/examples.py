"""How many examples the property tests draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings


def examples(number: int) -> Callable[[Any], Any]:
    """Draw so many, the same ones in every run, however slow the machine is."""
    allowed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=allowed,
    )
