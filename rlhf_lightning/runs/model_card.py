"""The README.md of an exported model: what it is, from what, and how good it was measured to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCardData

from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.licence import UNKNOWN, Licence
from rlhf_lightning.runs.public_config import without_folders
from rlhf_lightning.runs.summary import GateResult

CONFIG = "training_config.yaml"
OTHER_LICENCE = "license-of-the-base-model"  # its name beside `license: other`
_POLICY_USE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER)"""
_REWARD_USE = """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForSequenceClassification.from_pretrained(FOLDER)
batch = tokenizer([text + tokenizer.eos_token for text in texts], padding=True, return_tensors="pt")
scores = model(**batch).logits.squeeze(-1) + model.config.reward_offset"""
_ADAPTER_USE = """\
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained(FOLDER)  # loads the base model, too"""
_REWARD_ADAPTER_USE = """\
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoPeftModelForSequenceClassification.from_pretrained(FOLDER, num_labels=1)
model.config.pad_token_id = tokenizer.pad_token_id"""


class _Kind(NamedTuple):
    """What the cards of one stage say."""

    title: str
    what: str
    use: str = _POLICY_USE
    adapter_use: str = _ADAPTER_USE
    task: str = "text-generation"
    tags: tuple[str, ...] = ()
    precision: str = ""  # of its head
    from_scratch: str | None = None  # in place of `what`, of a model without a base


_KINDS = {
    "sft": _Kind(
        "SFT policy",
        "A causal language model after supervised fine-tuning.",
        from_scratch="A causal language model trained from random weights.",
    ),
    "reward": _Kind(
        "Reward model",
        "A reward model: a sequence classifier with one label. Its score is the classifier's "
        "output plus `reward_offset` of config.json, read at the last token (EOS).",
        _REWARD_USE,
        _REWARD_ADAPTER_USE,
        "text-classification",
        ("reward-model",),
        '. The head is in fp32: `from_pretrained(FOLDER, dtype="float32")` uses it so',
    ),
    "ppo": _Kind("PPO policy", "A causal language model after PPO against {against}."),
}


RoundingCost = tuple[float, float | None]  # relative error, kept share of what was learnt


@dataclass(frozen=True)
class CardFacts:
    """What a model card says.

    Args:
        stage: "sft", "reward" or "ppo".
        run: name of the run folder.
        base: what it was trained from, as the configuration names it; None for random weights.
        data: name of the data.
        licence: of the base.
        hub_base: hub name of the model at the root; None where nobody knows it.
        datasets: hub names of the data.
        settings: hyper-parameters, flat.
        metrics: final ones; of an unfinished run those of its last iteration.
        gates: their outcome.
        versions: of the software.
        checkpoint: says which checkpoint this is, for one that is not the end of a finished run.
        reward: what config.json says of a reward model: `reward_offset` and the pad token.
        is_adapter: whether the folder holds an adapter alone.
        against: what scored the answers of PPO.
        needs: of an adapter: what it stands on.
        rounding: what rounding the weights to bf16 has cost; None where they are in fp32.
    """

    stage: str
    run: str
    base: str | None
    data: str
    licence: Licence = field(default_factory=lambda: Licence(UNKNOWN, "nobody said"))
    hub_base: str | None = None
    datasets: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    gates: Sequence[GateResult] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str | None = None
    reward: Mapping[str, Any] = field(default_factory=dict)
    is_adapter: bool = False
    against: str = "a reward model"
    needs: str | None = None
    rounding: RoundingCost | None = None


def write_model_card(folder: Path, facts: CardFacts) -> Path:
    """Write `README.md` beside the weights, with the front matter that the hub reads."""
    parts = [
        _front_matter(facts),
        f"# {_kind(facts).title}{' (adapter)' if facts.is_adapter else ''}: {facts.data}",
        _what(facts),
        f"```python\n{_use(facts)}\n```",
        _origin(facts),
        _precision(facts),
        _gates(facts),
        _table("Metrics" if facts.checkpoint else "Final metrics", "metric", facts.metrics),
        _table("Settings", "setting", facts.settings),
        f"The whole configuration is in `{CONFIG}`.",
    ]
    path = folder / "README.md"
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def _kind(facts: CardFacts) -> _Kind:
    """Return what is said of a stage; one that another package brings makes a language model."""
    name = facts.stage
    return _KINDS.get(name) or _Kind(f"{name} model", f"A causal language model after {name}.")


def _front_matter(facts: CardFacts) -> str:
    data = ModelCardData(
        library_name="peft" if facts.is_adapter else "transformers",
        license=facts.licence.identifier,
        license_name=OTHER_LICENCE if facts.licence.identifier == "other" else None,
        base_model=facts.hub_base,
        base_model_relation=facts.hub_base and ("adapter" if facts.is_adapter else "finetune"),
        datasets=list(facts.datasets) or None,
        pipeline_tag=_kind(facts).task,
        tags=["rlhf_lightning", facts.stage, *_kind(facts).tags],
    )
    return f"---\n{data.to_yaml()}\n---"


def _what(facts: CardFacts) -> str:
    kind = _kind(facts)
    what = kind.what.replace("{against}", facts.against)
    if facts.base is None:
        what = kind.from_scratch or what
    if "reward/sample_std" in facts.metrics:
        what += " Over samples of the SFT policy it has mean 0 and standard deviation 1."
    if facts.reward:
        offset, pad = facts.reward["reward_offset"], facts.reward["pad_token"]
        what += (
            f" Here `reward_offset` is {offset:.6g}: differences of scores do not need it. Texts "
            f"are padded with `{pad}`, which is not EOS."
        )
    if facts.needs:
        what += f" {facts.needs}"
    if facts.checkpoint:
        what += f"\n\n**{facts.checkpoint}**"
    return what


def _use(facts: CardFacts) -> str:
    kind = _kind(facts)
    return kind.adapter_use if facts.is_adapter else kind.use


def _origin(facts: CardFacts) -> str:
    base = "random weights" if facts.base is None else without_folders(facts.base)
    root = f" (base model: {facts.hub_base})" if facts.hub_base not in (None, base) else ""
    lines = [
        f"* Trained from: {base}{root}",
        f"* Licence: {facts.licence.identifier}: {facts.licence.reason}. The licence of the model "
        "it was trained from applies.",
        f"* Data: {', '.join([facts.data, *(d for d in facts.datasets if d != facts.data)])}",
        f"* Run: {facts.run}",
    ]
    if facts.versions:
        software = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
        lines.append(f"* Made with: {software}")
    return "\n".join(lines)


def _precision(facts: CardFacts) -> str:
    if facts.rounding is None:
        return ""
    error, kept = facts.rounding
    text = (
        "The weights are in bf16, as those of the base; the figures below were measured before "
        f"they were rounded from fp32. Rounding changed them by {100 * error:.2g} % (norm of the "
        "difference over that of the weights)"
    )
    if kept is not None:
        text += f" and kept {100 * kept:.1f} % of what training changed"
    return f"{text}{_kind(facts).precision}."


def _gates(facts: CardFacts) -> str:
    if not facts.gates:
        return ""
    rows = [
        f"| {g.name} | {'passed' if g.passed else 'NOT PASSED'}: {g.reason} |" for g in facts.gates
    ]
    return "\n".join(["## Gates", "", "| gate | outcome |", "|---|---|", *rows])


def _table(title: str, column: str, values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    rows = [f"| {name} | {_cell(value)} |" for name, value in sorted(values.items())]
    return "\n".join([f"## {title}", "", f"| {column} | value |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
