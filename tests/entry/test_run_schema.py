"""The schema by which an editor completes and checks a `run.yaml`."""

import importlib.util
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from rlhf_lightning.app.config.compose import conf_dir, register
from rlhf_lightning.app.config.recipes import SCHEMA, recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def schema():
    return json.loads((conf_dir() / SCHEMA).read_text(encoding="utf-8"))


def problems(schema, content):
    found = jsonschema.Draft202012Validator(schema).iter_errors(content)
    return ["/".join(map(str, error.absolute_path)) for error in found]


def test_the_schema_is_the_one_that_the_classes_give(schema):
    spec = importlib.util.spec_from_file_location("builder", ROOT / "docs/build_schema.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    assert builder.schema() == schema, "run `python docs/build_schema.py`"


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "grpo", "ppo"])
def test_a_recipe_fits_with_each_of_its_commented_defaults(schema, name):
    register()
    text = recipe(name, [])
    assert f"$schema={conf_dir() / SCHEMA}" in text
    content = yaml.safe_load(text)
    for line in re.findall(r"^# ([\w.]+: .*)$", text, re.M):
        content |= yaml.safe_load(line)
    assert len(content) > 10
    assert problems(schema, content) == []


def test_what_a_user_writes_otherwise_fits_too(schema):
    own = {
        "experiment": "mine",
        "logger": "wandb",
        "module": {"ppo": {"kl_coef": 0.1}},
        "module.mine.beta": 1,
        "callbacks.extra.mine._target_": "mine.Callback",
        "data.batch_size": "${oc.env:BATCH}",
        "~safety": None,
        "hparams/ppo@module.ppo": "ppo",
    }
    assert problems(schema, own) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("module.ppo.kl_coff", 0.1),
        ("module.ppo.kl_coef", -0.1),
        ("module.ppo.surrogate", "pop"),
        ("data.batch_size", "64"),
        ("trainer.devices", 0),
        ("experimnt", "ppo"),
    ],
)
def test_a_mistake_is_marked(schema, key, value):
    assert problems(schema, {"experiment": "ppo", key: value})
