"""Errors of a configuration in one line: key, got, wanted, nearest key, fix."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from rlhf_lightning.app.config.compose import choices, composed, describe_interpolation
from rlhf_lightning.app.config.targets import did_you_mean, listed
from rlhf_lightning.arguments import is_number

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError)
OF_TRAINING = ("logger=", "logger.", "debug=")  # how words begin that training alone takes
ADDED = ("experiment", "preset", "sweeps")  # groups that are in no defaults list


def explain(error: Exception, overrides: list[str], config_name: str = "train") -> str:
    """Return a composition error in one line, with a did-you-mean for what is mistyped.

    Args:
        error: what `hydra.compose` raised, one of `COMPOSE_ERRORS`.
        overrides: of the command line.
        config_name: what was composed.
    """
    if (file := _a_file(overrides)) is not None:
        return file
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = sorted(error.options or choices(group))
        return f"{group}={name} is none of {listed(known)}{did_you_mean(name, known)}"
    text = str(error).strip()
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override, text)
    for pattern, answer in _ANSWERS:
        found = re.search(pattern, text)
        if found is not None:
            return answer(found, overrides)
    found = re.search(r"Could not override '([\w./@]+)'", text)
    if found is not None:
        return _unknown(found.group(1), overrides, config_name)
    if isinstance(error, OmegaConfBaseException):
        return describe_interpolation(error)
    return text.partition("\n")[0] or type(error).__name__


def _a_file(overrides: list[str]) -> str | None:
    """Say how a file of records is given, where one stands in the place of a data set's name."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "dataset" and Path(value).is_file():
            return (
                f"{override}: a file of records is given by dataset=files dataset.path={value} "
                "dataset.name=NAME, where NAME is what its models are kept under"
            )
    return None


def _unreadable(override: str, text: str) -> str:
    if override.startswith("-") or ("=" not in override and not override.startswith("~")):
        return f"{override!r} sets nothing: write KEY=VALUE, such as seed=2"
    reason = text.removeprefix(f"Error parsing override '{override}'").strip().partition("\n")[0]
    override = " ".join(override.split())
    return (
        f"{override} cannot be read ({reason or 'a blank, a comma or a bracket'}): close what is "
        f"opened, and quote a text that holds such signs, as in "
        f"'{override.partition('=')[0]}=\"a, b\"'"
    )


def _several(found: re.Match[str], overrides: list[str]) -> str:
    override = found.group(1)
    key, _, value = override.partition("=")
    return (
        f"{override} gives several values: -m runs a sweep over them; one text with commas is "
        f"quoted, as in '{key}=\"{value}\"', and a list is [{value}]"
    )


def _twice(found: re.Match[str], overrides: list[str]) -> str:
    group = found.group(1)
    given = [o.lstrip("+") for o in overrides if o.lstrip("+").startswith(f"{group}=")]
    return f"{' and '.join(given) or group}: give {group} once"


def _no_name(found: re.Match[str], overrides: list[str]) -> str:
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if not key:
            return f"{override!r} names no key: write KEY=VALUE, such as seed=2"
        known = choices(key) if "." not in key else []
        if known and value not in known:
            return f"{key}={value} is none of {listed(known)}{did_you_mean(value, known)}"
    return found.group(0)


_ANSWERS = (
    (r"Ambiguous value for argument '([^']+)'", _several),
    (r"Sweep parameters '([^']+)'", _several),
    (r"Multiple values for ([\w/]+)", _twice),
    (r"Config group override must be a string or a list\. Got \w+", _no_name),
    (r"argument of type '\w+' is not iterable", _no_name),
)


def _unknown(path: str, overrides: list[str], config_name: str) -> str:
    given = next((o for o in overrides if o.split("=")[0].lstrip("+~") == path), path)
    if path in ADDED:
        return f"{given} would replace a choice that is not there: add it with +{given}"
    if given.startswith(OF_TRAINING):
        return f"{given} is for training, and rlhf-{config_name} does not train: leave it out"
    kept = [o for o in overrides if o != given]
    try:
        keys = list(_paths(composed(config_name, kept)))
    except COMPOSE_ERRORS:  # it is not the only mistake
        keys = []
    return f"unknown key {path}{did_you_mean(path, keys)}"


def _paths(node: object, where: str = "") -> Iterator[str]:
    if isinstance(node, DictConfig):
        for key in map(str, node):
            path = f"{where}.{key}" if where else str(key)
            yield path
            if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
                yield from _paths(node[key], path)


_TYPES = {"int": "int", "float": "float", "string": "str", "bool": "bool", "list": "a list"}
_TYPES["path"] = "a path"
_GROUPS = ("model_type", "model_attributes_type", "dict_type", "mapping_type")
_BOUNDS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<"}
_BOUNDS["less_than_equal"] = "<="
_HPARAMS = re.compile(r"\b\w*(?:Hparams|Thresholds|ActionSettings|Sharing|PageSettings)(?=[.=])")


def explain_invalid(
    error: ValidationError, settings: type[BaseModel], written: Mapping[str, Any]
) -> str:
    """Return the first error of a configuration in one line.

    Args:
        error: of the settings of a command.
        settings: their class.
        written: the configuration with its interpolations, which are named where they are wrong.
    """
    found = error.errors()
    # A key that is mistyped explains one that is missing, and a node those that refer to it.
    order = ("extra_forbidden", "value_error")
    found.sort(
        key=lambda item: (
            order.index(item["type"]) if item["type"] in order else len(order),
            item["loc"][:1] not in (("dataset",), ("model",)),
        )
    )
    text = _explain(dict(found[0]), settings)
    named = re.match(r"[\w.]+(?==)", text)  # deeper than pydantic's place, for dataclasses
    node: Any = written
    for part in named[0].split(".") if named else found[0]["loc"]:
        node = node.get(part) if isinstance(node, Mapping) else None
    given = f" ({node})" if isinstance(node, str) and "${" in node else ""
    return f"{text}{given}"


def _explain(error: dict[str, Any], settings: type[BaseModel]) -> str:
    loc = [str(part) for part in error["loc"] if not str(part).startswith("function-")]
    key, value, kind = ".".join(loc), error["input"], error["type"]
    context = error.get("ctx", {})
    optional = type(None) in typing.get_args(_annotation(settings, loc))
    if value == "???":
        return f"{key} is not set: add {key}=..."
    if kind == "extra_forbidden":
        names = [".".join([*loc[:-1], name]) for name in _fields(settings, loc[:-1])]
        return f"unknown key {key}{did_you_mean(key, names)}"
    if kind == "missing":
        first = loc[0]
        whole = f", or choose {first} as a whole ({first}=NAME)" if choices(first) else ""
        return f"{key} is missing: set it{whole}"
    if kind == "literal_error":
        return _choice(key, value, _annotation(settings, loc))
    if kind in _BOUNDS:
        bound = next(v for k, v in context.items() if k in ("gt", "ge", "lt", "le"))
        return f"{key}={_shown(value)} is impossible: it must be {_BOUNDS[kind]} {_shown(bound)}"
    if kind == "finite_number":
        return f"{key}={value} must be finite"
    if kind in ("string_too_short", "too_short"):
        return f"{key}={value!r} must not be empty"
    if kind == "value_error":
        text = str(context["error"])
        if text.startswith(("=", ".", " ")):
            return f"{key}{text}".replace(" ._target_", f" {key}._target_")
        return _HPARAMS.sub(key, text) if key else text
    if kind in _GROUPS:
        if optional:
            return f"{key}={value!r} must be null or a group of settings{_example(settings, loc)}"
        return f"{key}={value!r} must be a group of settings: {key}.KEY=VALUE changes one of them"
    wanted = _TYPES.get(kind.split("_")[0], kind)
    if optional:
        wanted += " or None"
    number = " (write 1e-5 as 1.0e-5: YAML reads 1e-5 as text)"
    written = isinstance(value, str) and is_number(value)
    return (
        f"{key}={value!r} is {type(value).__name__}, expected {wanted}{number if written else ''}"
    )


def _example(settings: type[BaseModel], loc: list[str]) -> str:
    model = _model(_annotation(settings, loc))
    for name, field in model.model_fields.items() if model is not None else ():
        if not field.is_required():
            return f", such as {{{name}: {field.default}}}"
    return ""


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _choice(key: str, value: object, annotation: Any) -> str:
    options = typing.get_args(annotation) or (annotation,)
    allowed = [
        item
        for option in options
        for item in (typing.get_args(option) or ([None] if option is type(None) else [option]))
    ]
    words = ["null" if item is None else str(item) for item in allowed]
    return f"{key}={value} must be one of {', '.join(words)}{did_you_mean(str(value), words)}"


def _fields(settings: Any, loc: list[str]) -> list[str]:
    model = settings if not loc else _annotation(settings, loc)
    found = _model(model)
    return list(found.model_fields) if found is not None else []


def _annotation(settings: Any, loc: list[str]) -> Any:
    """Return the annotation of the field at a place; Any where it is not known."""
    found: Any = settings
    for part in loc:
        model = _model(found)
        if model is None or part not in model.model_fields:
            return Any
        found = model.model_fields[part].annotation
    return found


def _model(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    models = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
    return models[0] if models else None


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)
