"""The README.md of an exported model: its kind, origin, licence, and final metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import PackageLoader
from markupsafe import Markup

from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.hub import UNKNOWN
from rlhf_lightning.runs.jinja import environment
from rlhf_lightning.runs.public_config import without_folders
from rlhf_lightning.runs.summary import GateResult
from rlhf_lightning.runs.verdict import prefers_longer

CONFIG = "training_config.yaml"
OTHER_LICENCE = "license-of-the-base-model"  # its name beside `license: other`


RoundingCost = tuple[float, float | None]  # relative error, kept share of what was learnt


@dataclass(frozen=True)
class CardFacts:
    """The content of a model card.

    Args:
        stage: name of the stage, a tag.
        run: name of the run folder.
        base: what it was trained from, as the configuration names it; None for random weights.
        data: name of the data.
        licence: licence of the base, in the hub's words.
        hub_base: hub name of the model at the root; None where it is not known.
        datasets: hub names of the data.
        settings: hyper-parameters, flat, by name.
        metrics: final ones; of an unfinished run those of its last iteration.
        gates: outcomes of the run's gates.
        versions: versions of the software, by package.
        checkpoint: says which checkpoint this is, for one that is not the end of a finished run.
        doubts: what speaks against the metrics, in sentences.
        reward: what config.json says of a reward model: `reward_offset` and the pad token.
        is_adapter: whether the folder holds an adapter alone.
        against: what scored the responses in training; None where nothing did.
        needs: base model that an adapter needs.
        rounding: what rounding the weights to bf16 has cost; None where they are in fp32.
        title: the training in words, such as "PPO"; by default the stage.
        is_reward: whether the model scores responses.
    """

    stage: str
    run: str
    base: str | None
    data: str
    licence: str = UNKNOWN
    hub_base: str | None = None
    datasets: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    gates: Sequence[GateResult] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str | None = None
    doubts: str = ""
    reward: Mapping[str, Any] = field(default_factory=dict)
    is_adapter: bool = False
    against: str | None = None
    needs: str | None = None
    rounding: RoundingCost | None = None
    title: str = ""
    is_reward: bool = False


def write_model_card(folder: Path, facts: CardFacts) -> Path:
    """Write `README.md` beside the weights, with the front matter that the hub reads."""
    text = _TEMPLATES.get_template("model_card.md").render(
        facts=facts,
        front_matter=_front_matter(facts).to_yaml(),
        title=facts.title or facts.stage,
        base="random weights" if facts.base is None else without_folders(facts.base),
        config=CONFIG,
        warning=f"{prefers_longer(facts.metrics)} {facts.doubts}".strip(),
    )
    path = folder / "README.md"
    write_text(path, text)
    return path


def _front_matter(facts: CardFacts) -> ModelCardData:
    return ModelCardData(
        library_name="peft" if facts.is_adapter else "transformers",
        license=facts.licence,
        license_name=OTHER_LICENCE if facts.licence == "other" else None,
        base_model=facts.hub_base,
        base_model_relation=facts.hub_base and ("adapter" if facts.is_adapter else "finetune"),
        datasets=list(facts.datasets) or None,
        pipeline_tag="text-classification" if facts.is_reward else "text-generation",
        tags=["rlhf_lightning", facts.stage, *(["reward-model"] if facts.is_reward else [])],
    )


# Signs by which a line of Markdown holds HTML, a cell's end, code or emphasis, or a link.
_MARKS = re.compile(r"[\\|`*]|\](?=[(\[:])")
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]")


def plain(value: Any) -> Any:
    """Return a value as plain text of one line of Markdown, but for what is marked as safe."""
    if hasattr(value, "__html__"):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    line = _MARKS.sub(r"\\\g<0>", one_line(value))
    return Markup(line.replace("<", "&lt;"))


def one_line(value: Any) -> str:
    """Return a text in one line without control characters."""
    return _CONTROLS.sub("", " ".join(str(value).split()))


def _code(value: Any) -> Markup:
    """Return a text in Markdown's marks of code, which nothing in it ends."""
    return Markup(f"`{one_line(value).replace('`', chr(39))}`")


_OWN = PackageLoader("rlhf_lightning.runs")
_TEMPLATES = environment(_OWN, finalize=plain, keep_trailing_newline=True)
_TEMPLATES.filters["code"] = _code
