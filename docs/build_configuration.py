"""Write docs/configuration.md from the hyper-parameter dataclasses and conf/.

`python docs/build_configuration.py`. A test fails when the page and the code differ.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf_lightning.app.config.compose import HPARAMS, conf_dir, described  # noqa: E402
from rlhf_lightning.app.config.recipes import meanings_of  # noqa: E402
from rlhf_lightning.hparams import Usual  # noqa: E402
from rlhf_lightning.misfit import is_union  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
WHERE = {
    "ppo": "module.ppo",
    "sampling": "module.sampling",
    "sft": "module.sft",
    "reward": "module.reward",
    "grpo": "module.grpo",
    "dpo": "module.dpo",
    "distillation": "module.distillation",
    "lora": "lora",
}
TITLES = {
    "ppo": "PPO",
    "sampling": "Sampling of rollouts",
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "grpo": "GRPO and its relatives",
    "dpo": "Direct preference optimization",
    "distillation": "On-policy distillation",
    "lora": "Adapters (`lora=lora`)",
}
# Groups whose keys are listed one by one; of the others only the choices are.
LISTED = ("trainer", "evaluation", "callbacks", "paths", "logger", "strategy", "data", "rollout")
LISTED += ("scorer", "judge", "doctor", "budget", "safety")
# Where the keys of the others are explained.
ELSEWHERE = {
    "annotator": "Annotators label pairs: [The preference lab](preferences.md#annotators).",
    "doctor": "Thresholds of the detectors (`doctor.thresholds.*`): [The doctor](doctor.md).",
    "gates": "How a threshold is written: [Evaluation](evaluation.md). Experiments take "
    "those of their dataset, in `conf/gates/by_dataset`.",
    "dataset": "Each dataset has its keys in its file in `conf/dataset`: "
    "[Your model and data](your_model_and_data.md#the-data).",
}
NOT_SHOWN = ("experiment", "model", "module")
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
INTRODUCTION = """\
# Configuration

`python docs/build_configuration.py` writes this page from `rlhf_lightning/hparams.py` and `conf/`;
a test checks that they agree. `python -m rlhf_lightning.train +experiment=ppo --cfg job --resolve`
prints the values of a run; add your settings to the same line.

*default* is that of the dataclass, which `from_pretrained` uses, or of the group's file.
Experiments override several of them.

- `rlhf-train --recipe dpo` prints those that people change as a file for `--config`.
- `GROUP=CHOICE` replaces a group: `logger=none`, `scorer=text_reward_model`, `debug=fast`.
- `KEY=VALUE` sets one value: `module.ppo.kl_coef=0.1`. `null` is none, `???` must be
  given. Write `1.0e-5`: `1e-5` is text in YAML.
- `+experiment=`, `+preset=` and `+sweeps=` take a plus: they are not in the defaults.
- An unknown key is an error that names the nearest one. A value outside the usual range is a
  warning, an impossible one an error.
- Other commands have further settings, with their meanings, in
  `conf/plan.yaml`, `conf/collect.yaml`, `conf/annotate.yaml`, `conf/evaluate.yaml`,
  `conf/pipeline.yaml`, `conf/dashboard.yaml`, `conf/export.yaml`, `conf/preview.yaml`
  (`rlhf-data`), `conf/chat.yaml` and `conf/report.yaml`. For `rlhf-export`, `rlhf-chat` and
  `rlhf-report` a bare path is `run=PATH`, for `rlhf-data` it is `path=FILE`.
"""


def shown(value: Any) -> str:
    """Return a default as YAML has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def of_annotation(hint: Any) -> tuple[str, list[str], str]:
    """Return the type of an annotation, what is possible and what is usual."""
    if get_origin(hint) is Literal:
        return "str", [", ".join(f"`{choice}`" for choice in get_args(hint))], ""
    if is_union(hint):
        kinds, possible, usual = zip(*map(of_annotation, get_args(hint)), strict=True)
        kind = " or ".join(dict.fromkeys(kinds))
        return kind, list(dict.fromkeys(chain.from_iterable(possible))), "".join(usual)
    if get_origin(hint) is not Annotated:
        return "null" if hint is type(None) else hint.__name__, [], ""
    kind, possible, usual = of_annotation(get_args(hint)[0])
    for marker in get_args(hint)[1:]:
        if isinstance(marker, Usual):
            usual = f"{marker.low:g} to {marker.high:g}"
        for limit in getattr(marker, "metadata", ()):
            possible += [
                f"{sign} {getattr(limit, name):g}"
                for name, sign in SIGNS.items()
                if getattr(limit, name, 2**63) < 2**63  # beyond is no number of anything
            ]
    return kind, possible, usual


def hparams_section() -> Iterator[str]:
    """Yield one table for each dataclass of hyper-parameters."""
    for name, where in WHERE.items():
        cls = HPARAMS[name]
        meanings, hints = meanings_of(cls), get_type_hints(cls, include_extras=True)
        yield f"\n## {TITLES[name]}\n\n`{where}.*`\n"
        yield "| key | type | default | possible | usual | meaning |\n|---|---|---|---|---|---|"
        for item in fields(cls):
            kind, possible, usual = of_annotation(hints[item.name])
            default = "" if item.default is MISSING else f"`{shown(item.default)}`"
            yield (
                f"| `{where}.{item.name}` | {kind} | {default} | {', '.join(possible)} | {usual} | "
                f"{meanings[item.name]} |"
            )


def keys_of(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and comment of a YAML file; nested keys with their path.

    The comment stands behind the key or on the lines above it, those at the top of the file apart.
    """
    path: list[tuple[int, str]] = []
    above: list[str] = []
    top = True
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("#"):
            above += [] if top else [line.lstrip(" #")]
            continue
        top, noted, above = False, " ".join(above), []
        match = re.fullmatch(r"( *)([\w.]+):(?: ([^#]*?))?(?:\s*# (.*))?", line)
        if match is None or match.group(2) == "defaults":
            continue
        indent, key = len(match.group(1)), match.group(2)
        path = [item for item in path if item[0] < indent] + [(indent, key)]
        value = (match.group(3) or "").strip()
        comment = match.group(4) or noted
        if (value or comment) and not key.startswith("_"):
            yield ".".join(name for _, name in path), value, comment


def is_global(file: Path) -> bool:
    """Return whether a choice sets keys outside of its group."""
    return file.read_text(encoding="utf-8").startswith("# @package _global_")


def cell(text: str) -> str:
    """Return text for a table cell."""
    return text.replace("|", "\\|")


def groups_section() -> Iterator[str]:
    """Yield the top-level keys, then every group with its choices and keys."""
    yield "\n## The top\n\n| key | default | meaning |\n|---|---|---|"
    for key, value, comment in keys_of(conf_dir() / "train.yaml"):
        if key.partition(".")[0] in ("hydra",) or not (value or comment):
            continue
        yield f"| `{key}` | `{cell(value) or 'null'}` | {cell(comment)} |"
    for folder in sorted(p for p in conf_dir().iterdir() if p.is_dir()):
        group = folder.name
        if group in NOT_SHOWN:
            continue
        files = sorted(folder.glob("*.yaml"))
        yield f"\n## {group}\n\n| choice | what it is |\n|---|---|"
        for file in files:
            yield f"| `{group}={file.stem}` | {cell(described(file))} |"
        if group in ELSEWHERE:
            yield f"\n{ELSEWHERE[group]}"
        if group in LISTED:
            yield "\n| key | default | meaning |\n|---|---|---|"
            for file in files:
                several = f" ({file.stem})" if len(files) > 1 else ""
                for key, value, comment in keys_of(file) if not is_global(file) else ():
                    # Of what a model may change, the value without it.
                    value = re.sub(r"\$\{oc\.select:.*,([^,{}]+)\}+", r"\1", value)
                    written = f"`{cell(value)}`" if value else ""
                    yield f"| `{group}.{key}`{several} | {written} | {cell(comment)} |"


def page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION.rstrip(), *hparams_section(), *groups_section()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
