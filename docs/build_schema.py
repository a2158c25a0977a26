"""Write conf/run.schema.json, by which editors complete and check a `run.yaml`.

`python docs/build_schema.py`. It is made from the hyper-parameters, the settings and the comments
of conf/; a test fails when they differ.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from build_configuration import WHERE, keys_of  # noqa: E402

from rlhf_lightning.app.config.compose import HPARAMS, conf_dir, described  # noqa: E402
from rlhf_lightning.app.config.recipes import SCHEMA, meanings_of  # noqa: E402
from rlhf_lightning.app.config.settings import TrainSettings  # noqa: E402
from rlhf_lightning.app.config.targets import resolve  # noqa: E402

# Below these a user's files and classes have keys of their own.
OPEN = ("callbacks.extra", "dataset", "gates", "hydra", "launcher", "model", "module")
OPEN += ("optimizer", "paths", "rollout", "safety", "scheduler", "scorer")
PLACES = {**WHERE, "doctor": "doctor.thresholds", "doctor_actions": "doctor.actions"}
REFERENCE = {"$ref": "#/$defs/reference"}


def leaves(node: Mapping[str, Any], known: Mapping[str, Any], key: str) -> Iterator[Any]:
    """Yield dotted key and schema of each setting below a node of pydantic's schema."""
    options = [node, *node.get("anyOf", ())]
    groups = [known[one["$ref"].rpartition("/")[2]] for one in options if "$ref" in one]
    for group in groups:
        if "path" not in group["properties"]:  # a target's keys stand in conf/
            for name, inner in group["properties"].items():
                yield from leaves(inner, known, f"{key}.{name}")
    if not groups:
        yield key, {name: value for name, value in node.items() if name != "title"}


def arguments(target: str | None) -> dict[str, Any]:
    """Return the schema of each argument of a class of ours that has a plain one."""
    found: dict[str, Any] = {}
    if target is not None and target.startswith("rlhf_lightning."):
        call = resolve(target, "conf")
        hints = get_type_hints(getattr(call, "__init__", call), include_extras=True)
        for name, hint in hints.items():
            with suppress(PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
                leaf = TypeAdapter(hint).json_schema()
                found[name] = {} if "$ref" in str(leaf) else leaf
    return found


def settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key that may be set, dotted, with the schema of its value."""
    groups = {*TrainSettings.model_fields, "experiment", "preset", "debug", "launcher"}
    for group in sorted(folder for folder in conf_dir().iterdir() if folder.name in groups):
        about = {file.stem: described(file) for file in sorted(group.glob("*.yaml"))}
        for file in sorted(group.glob("*.yaml")) if group.name != "experiment" else ():
            node = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            types = arguments(node.get("_target_"))
            for key, _, comment in keys_of(file):
                about = {"description": comment} if comment else {}
                yield f"{group.name}.{key}", types.get(key, {}) | about
        choices = [{"const": name, "description": text} for name, text in about.items()]
        # Or a name of a user's own folder, or its keys one below the other.
        yield group.name, {"anyOf": [*choices, {"type": ["string", "object", "null"]}]}
    sweeps = sorted(file.stem for file in (conf_dir().parent / "sweeps").glob("*.yaml"))
    yield "sweeps", {"anyOf": [{"enum": sweeps}, {"type": "string"}]}
    schema = TrainSettings.model_json_schema()
    for name, node in schema["properties"].items():
        for key, leaf in leaves(node, schema["$defs"], name):
            if "." in key or not (conf_dir() / name).is_dir():
                yield key, leaf
    for name, cls in HPARAMS.items():
        meanings = meanings_of(cls)
        for field, leaf in TypeAdapter(cls).json_schema()["properties"].items():
            about = {"description": meanings[field]} if field in meanings else {}
            own = {key: value for key, value in leaf.items() if key != "title"}
            yield f"{PLACES[name]}.{field}", own | about


def schema() -> dict[str, Any]:
    """Return the schema; a value may also refer to another key, as in `${seed}`."""
    found: dict[str, dict[str, Any]] = {}
    for key, leaf in settings():
        found[key] = found.get(key, {}) | leaf
    properties = {}
    for key, leaf in sorted(found.items()):
        about = {name: leaf.pop(name) for name in ("description", "default") if name in leaf}
        options = leaf.get("anyOf") or ([leaf] if leaf else [])
        properties[key] = about | ({"anyOf": [*options, REFERENCE]} if options else {})
    groups = sorted({key.rpartition(".")[0] for key in found if "." in key})
    for group in groups:  # a nested group, as OmegaConf reads it
        properties.setdefault(group, {"type": "object"})
    known, free = ("|".join(map(re.escape, names)) for names in (PLACES.values(), OPEN))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rlhf-train --config run.yaml",
        "type": "object",
        "properties": properties,
        "patternProperties": {rf"^([~+]|(?!({known})\.)({free})\.|[\w/]+@)": {}},
        "additionalProperties": False,
        "$defs": {"reference": {"type": "string", "pattern": r"^\$\{.*\}$"}},
    }


def text() -> str:
    """Return the file, with a line for each key."""
    found = schema()
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in found.pop("properties").items()
    ]
    head = json.dumps(found, indent=1).removesuffix("\n}")
    return head + ',\n "properties": {\n  ' + ",\n  ".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    (conf_dir() / SCHEMA).write_text(text(), encoding="utf-8")
