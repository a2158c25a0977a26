"""A wrong value from Python is refused by the call that was given it, under its argument's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

import lightning as L
import numpy as np
import pytest
import torch

import rlhf_lightning
from rlhf_lightning import LoraHparams, PolicyGradientModule, PPOModule, SFTHparams
from rlhf_lightning.arguments import annotations_of, fitting, is_union, without_markers

UNTYPED = ("policy", "reward", "baseline", "prompts", "module", "source")  # read by functions
UNTYPED += ("tokenizer", "scorer", "generator")
WRONG: dict[Any, list[Any]] = {
    int: [8.5, True, "8", [8], None],
    float: [True, "0.5", float("nan"), float("inf"), []],
    bool: ["no", 1, 0.0, None],
    str: [3, b"x", ["x"], True],
    Path: [3, b"x", ["x"], True],
    Callable: [3, "cosine", torch.optim.SGD([torch.zeros(1)], lr=0.1)],
}


def calls() -> Iterator[tuple[str, Any]]:
    for name in rlhf_lightning.__all__:
        public = getattr(rlhf_lightning, name)
        yield name, public
        if hasattr(public, "from_pretrained"):
            yield f"{name}.from_pretrained", public.from_pretrained


def options(hint: Any) -> list[Any]:
    hint = without_markers(hint)
    return [o for one in get_args(hint) for o in options(one)] if is_union(hint) else [hint]


def wrong_values(hint: Any) -> list[Any]:
    allowed = options(hint)
    if Any in allowed:
        return []
    found = [value for kind in WRONG for value in WRONG[kind]] + [object(), LoraHparams, {"a": 1}]
    return [value for value in found if not any(could_be(value, one) for one in allowed)]


def could_be(value: Any, hint: Any) -> bool:
    """Say by Python's own rules, not by the package's, whether a value may be meant."""
    origin = getattr(hint, "__origin__", hint)
    if origin is float:
        return type(value) in (int, float) and value == value and abs(value) != float("inf")
    if origin is Path or origin in (str, int, bool):
        return type(value) is (str if origin is Path else origin)
    if "Callable" in str(hint):
        return callable(value)
    return not inspect.isclass(origin) or isinstance(value, origin)


def good(name: str, hint: Any) -> Any:
    for kind in options(hint):
        if is_dataclass(kind):
            return kind()  # type: ignore[operator]
        if kind in (str, int, bool, float, Path):
            return {str: "x", Path: "x"}.get(kind, 1)
    if name == "scorers":
        return {}
    if name == "module":
        return L.LightningModule()
    return list if name in ("load", "models", "model", "policy", "optimizer", "function") else None


CASES = [
    (name, call, argument, wrong_values(hint))
    for name, call in calls()
    for argument, hint in annotations_of(call).items()
    if argument not in (*UNTYPED, "return", "trainer")
    and argument in inspect.signature(call).parameters
]


def test_the_arguments_of_every_public_name_are_tried() -> None:
    assert {name for name, _ in calls()} == {case[0] for case in CASES}
    assert sum(len(case[3]) for case in CASES) > 500


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_a_wrong_value_is_refused_by_its_name(case: tuple[str, Any, str, list[Any]]) -> None:
    _, call, argument, values = case
    parameters, hints = inspect.signature(call).parameters, annotations_of(call)
    required = [p for p in parameters.values() if p.default is p.empty and p.kind in (1, 3)]
    given = {p.name: good(p.name, hints.get(p.name, Any)) for p in required if p.name != "self"}
    for value in values:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(**given | {argument: value})
        assert f"{argument}=" in str(caught.value).partition(" ")[0]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cls", [PPOModule, PolicyGradientModule])
def test_adapters_with_dropout_train_no_policy_on_its_own_samples(cls: Any) -> None:
    with pytest.raises(ValueError, match=r"^lora\.dropout=0\.5"):
        cls.from_pretrained("nowhere", len, lora=LoraHparams(dropout=0.5))


def test_numbers_of_numpy_and_whole_floats_arguments_are_taken() -> None:
    assert fitting("seed", np.int64(3), int) == 3
    assert type(SFTHparams(learning_rate=np.float32(1e-4)).learning_rate) is float
    assert SFTHparams(max_grad_norm=np.int32(2)).max_grad_norm == 2.0
