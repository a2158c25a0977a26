"""A node of a configuration builds what the annotation of its place allows, and nothing else."""

from __future__ import annotations

import inspect

import pytest
from omegaconf import open_dict

from rlhf_lightning.app.config.compose import ConfigError, composed, register
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import Kind, TargetError, read_node, resolve
from rlhf_lightning.app.config.validate import read_settings

# One a way: a program, a loader, what a module imported, a method, what writes, talks or
# starts, what is private, what is none, and more of a library than a part of a model.
NASTY = [
    "os.system",
    "builtins.eval",
    "pickle.loads",
    "torch.load",
    "torch.hub.load",
    "hydra.utils.instantiate",
    "rlhf_lightning.app.train.os.system",
    "rlhf_lightning.rollout.scorers.base.importlib.import_module",
    "rlhf_lightning.models.factory.AutoModelForCausalLM.from_pretrained",
    "rlhf_lightning.PPOModule.load_from_checkpoint",
    "rlhf_lightning.SFTModule.generate",
    "rlhf_lightning.PPOModule.from_pretrained.__func__",
    "rlhf_lightning.runs.atomic.write_text",
    "rlhf_lightning.runs.hub.push_folder",
    "rlhf_lightning.train.main",
    "rlhf_lightning.data.sources.base.FileSource.__init__.__globals__",
    "rlhf_lightning.data.sources.base._rows",
    "rlhf_lightning.data.sources.base",
    "rlhf_lightning..data.sources.FileSource",
    "${oc.env:HOME}",
    "",
    "torch.nn.init.torch.load",
    "transformers.dynamic_module_utils.get_class_from_dynamic_module",
    "lightning.LightningModule.load_from_checkpoint",
    "lightning.pytorch.cli.LightningCLI",
    "peft.PeftModel.from_pretrained",
]
FORMS = {
    "target": lambda name: {"_target_": name},
    "partial": lambda name: {"_target_": name, "_partial_": True},
    "nested": lambda name: {
        "_target_": "lightning.pytorch.callbacks.LambdaCallback",
        "setup": {"_target_": name},
    },
    "in a list": lambda name: {
        "_target_": "lightning.pytorch.callbacks.RichModelSummary",
        "summarize_kwargs": [{"deep": {"_target_": name}}],
    },
}
CALLBACK, SCORER, SOURCE = (
    Kind("lightning.pytorch.Callback"),
    Kind("rlhf_lightning.rollout.scorers.base.Scorer"),
    Kind("rlhf_lightning.data.sources.base.RecordSource"),
)
GENERATOR = Kind("rlhf_lightning.rollout.generators.base.Generator", ("stop_ids", "pad_token_id"))


@pytest.mark.parametrize("name", NASTY)
def test_a_target_that_is_none_is_refused_with_its_place(name):
    with pytest.raises(TargetError) as caught:
        read_node({"_target_": name}, CALLBACK, "callbacks.extra.mine")
    assert str(caught.value).startswith(f"callbacks.extra.mine._target_={name}")


@pytest.mark.parametrize("form", FORMS)
def test_every_way_of_naming_a_target_is_seen(form):
    with pytest.raises(TargetError, match=r"_target_=os\.system "):
        read_node(FORMS[form]("os.system"), CALLBACK, "callbacks.extra.mine")


BASE = "rlhf_lightning.rollout.scorers.base"
WRITE = {"_target_": "rlhf_lightning.preferences.records.write_rows", "path": "x", "rows": []}
WRONG_KINDS = {
    "a function where a scorer belongs": (
        SCORER,
        {"_target_": f"{BASE}.load_function", "path": "f:g"},
    ),
    "a generator that is built at once": (
        GENERATOR,
        {"_target_": "rlhf_lightning.rollout.generators.base.TransformersGenerator"},
    ),
    "a node in place of a text": (
        SOURCE,
        {
            "_target_": "rlhf_lightning.data.sources.base.FileSource",
            "path": {"_target_": "rlhf_lightning.data.demo.source.DemoSource"},
        },
    ),
    "a node where anything is taken": (
        SCORER,
        {
            "_target_": "rlhf_lightning.rollout.scorers.http.HttpScorer",
            "url": "http://h/s",
            "extra": {"deep": [WRITE]},
        },
    ),
    "a source among scorers": (
        SCORER,
        {
            "_target_": f"{BASE}.WeightedScorer",
            "scorers": {"one": {"_target_": "rlhf_lightning.data.demo.source.DemoSource"}},
        },
    ),
}


@pytest.mark.parametrize(("kind", "node"), WRONG_KINDS.values(), ids=WRONG_KINDS)
def test_a_node_builds_only_what_the_annotation_of_its_place_allows(kind, node):
    with pytest.raises(TargetError, match=r"^here"):
        read_node(node, kind, "here")


@pytest.mark.parametrize("key", ["_args_", "__class__"])
def test_a_node_has_keyword_arguments_alone(key):
    node = {"_target_": f"{BASE}.FunctionScorer", "function": "f.py:g", key: ["x"]}
    with pytest.raises(TargetError, match=rf"unknown key here\.{key} "):
        read_node(node, SCORER, "here")


def test_what_the_run_gives_itself_is_no_argument_of_a_node():
    for key in ("stop_ids", "pad_token_id"):
        name = "rlhf_lightning.rollout.generators.base.CachedGenerator"
        node = {"_target_": name, "_partial_": True, key: 3}
        with pytest.raises(TargetError, match=rf"rollout\.{key} is given by the run"):
            read_node(node, GENERATOR, "rollout")


def test_reading_a_node_calls_nothing(tmp_path):
    marker = tmp_path / "imported"
    (tmp_path / "mine.py").write_text(f"open({str(marker)!r}, 'w')\ndef f(**_): return []\n")
    node = {"_target_": f"{BASE}.FunctionScorer", "function": f"{tmp_path / 'mine.py'}:f"}
    read = read_node(node, SCORER, "scorer")
    assert not marker.exists()
    assert read.named_again == {"scorer.function": f"{tmp_path / 'mine.py'}:f"}
    assert read.make().name == "f"
    assert marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "rlhf_lightning.data.sources.base.FileSource",
        "rlhf_lightning.data.demo.gold.gold_scores",
        "torch.nn.Linear",
        "transformers.PreTrainedTokenizerFast",
        "torchmetrics.MeanMetric",
    ],
)
def test_what_is_defined_in_an_allowed_package_is_found(name):
    found = resolve(name, "here")
    assert inspect.isclass(found) or inspect.isfunction(found)


def test_what_an_interpolation_makes_is_checked_as_well(tmp_path):
    """`oc.create` makes a node out of text, in which no key `_target_` can be seen."""
    marker = tmp_path / "executed"
    made = f"{{_target_:os.system,command:'touch {marker}'}}"
    register()
    cfg = composed("train", ["+experiment=ppo"])
    with open_dict(cfg):
        cfg.callbacks.extra = {"mine": f"${{oc.create:{made}}}"}
    with pytest.raises(ConfigError, match=r"callbacks\.extra\.mine\._target_=os\.system is not"):
        read_settings(TrainSettings, cfg)
    assert not marker.exists()


def test_a_trusted_prefix_keeps_the_rule_of_annotations(tmp_path, monkeypatch):
    (tmp_path / "mine_d3.py").write_text(
        "import os\nfrom lightning import Callback\nclass Mine(Callback):\n    pass\n"
        "def unannotated():\n    return Mine()\ndef number() -> int:\n    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = {"_target_": "mine_d3.Mine"}
    with pytest.raises(TargetError, match=r"is not allowed; .*RLHF_ALLOWED_TARGETS"):
        read_node(mine, CALLBACK, "a")
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "other.,mine_d3.")
    assert type(read_node(mine, CALLBACK, "a").make()).__name__ == "Mine"
    read_node({"_target_": "mine_d3.unannotated"}, CALLBACK, "a")
    for kind, name in ((SCORER, "Mine"), (CALLBACK, "number"), (CALLBACK, "os.system")):
        with pytest.raises(TargetError, match=rf"a\._target_=mine_d3\.{name} "):
            read_node({"_target_": f"mine_d3.{name}"}, kind, "a")
