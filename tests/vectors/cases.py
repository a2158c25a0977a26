"""Load the reference vectors and compare results with them, key by key.

`assert_matches` wants a result for every expected key of a case except those that UNUSED.md
names, so a key or a case can be left out only in writing.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).parent
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
DTYPES = [pytest.param(torch.float64, id="float64"), pytest.param(torch.float32, id="float32")]
TABLE_ROW = re.compile(r"^\| `(\S+)` \| `(\S+)` \| `(\S+)` \| (\S.*) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    topic: str
    name: str
    inputs: dict[str, Any]
    expected: dict[str, Any]

    def tensor(self, key: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor(self.inputs[key], dtype=dtype)

    def ids(self, key: str) -> Tensor:
        return torch.tensor(self.inputs[key], dtype=torch.int64)

    def mask(self, key: str = "mask") -> Tensor:
        return torch.tensor(self.inputs[key]).bool()

    def wanted_keys(self) -> set[str]:
        unused = unused_entries()
        return {
            key
            for key in self.expected
            if (self.topic, self.name, key) not in unused and (self.topic, "*", key) not in unused
        }

    def wholly_unused(self) -> bool:
        unused = unused_entries()
        return (self.topic, self.name, "*") in unused or (self.topic, "*", "*") in unused


@cache
def unused_entries() -> dict[tuple[str, str, str], str]:
    """(topic, case, key) -> reason, `*` standing for all."""
    text = (FOLDER / "UNUSED.md").read_text()
    return {(topic, case, key): why for topic, case, key, why in TABLE_ROW.findall(text)}


def topics() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def load(topic: str) -> tuple[Case, ...]:
    document = json.loads((FOLDER / f"{topic}.json").read_text())
    return tuple(Case(topic, c["name"], c["inputs"], c["expected"]) for c in document["cases"])


def cases(topic: str) -> list[Any]:
    """Every case of the topic that UNUSED.md does not name, as pytest parameters."""
    return [pytest.param(case, id=case.name) for case in load(topic) if not case.wholly_unused()]


def case(topic: str, name: str) -> Case:
    return next(c for c in load(topic) if c.name == name)


def assert_matches(
    case: Case,
    computed: dict[str, Any],
    dtype: torch.dtype,
    *,
    tolerance: float | None = None,
    of_key: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Compare every wanted key; `of_key` has wider tolerances of single keys."""
    assert set(computed) == case.wanted_keys(), f"{case.topic}/{case.name}: keys differ"
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    for key, actual in computed.items():
        allowed = max(tolerance, of_key.get(key, 0.0))
        actual = torch.as_tensor(actual, dtype=torch.float64)
        expected = _to_tensor(case.expected[key])
        torch.testing.assert_close(
            actual,
            expected,
            rtol=allowed,
            atol=allowed,
            equal_nan=True,
            msg=lambda text, key=key: f"{case.topic}/{case.name}/{key}: {text}",
        )


def _to_tensor(value: Any) -> Tensor:
    def null_to_nan(item: Any) -> Any:
        if isinstance(item, list):
            return [null_to_nan(entry) for entry in item]
        return float("nan") if item is None else item

    return torch.tensor(null_to_nan(value), dtype=torch.float64)
