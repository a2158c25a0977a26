"""Help of the commands: the text of `conf/`, and training's experiments and groups."""

from __future__ import annotations

import shutil
import textwrap

from omegaconf import OmegaConf

from rlhf_lightning.app.config.compose import WORDS, choices, conf_dir


def register_help() -> None:
    """Make `${rlhf_choices:}` the list of experiments and groups; call before composing."""
    OmegaConf.register_new_resolver("rlhf_choices", choices_text, replace=True)


def help_text(entry: str) -> str:
    """Return the help of a command, from its file in `conf/`."""
    register_help()
    return str(OmegaConf.load(conf_dir() / f"{entry}.yaml").hydra.help.template)


def choices_text(width: int | None = None) -> str:
    """Return experiments and groups, a paragraph each.

    Args:
        width: in characters; that of the terminal, at most 100, where it is None.
    """
    width = width or min(shutil.get_terminal_size().columns, 100)
    stages = choices("module")  # a file each, by its name
    heads, built_in = tuple(f"{stage}_" for stage in stages), ["base", *stages]
    names = [name for name in choices("experiment") if name not in built_in]
    recipes = sorted({name.partition("_")[2] for name in names if name.startswith(heads)})
    objectives = [name for name in names if not name.startswith(heads)]
    lines = _row("built-in world", " ".join((*built_in, *objectives)), width)
    lines += _row(
        "your own", "all but base, with model=, dataset=, lora=lora, strategy=fsdp", width
    )
    lines += _row("recipes", f"sft_NAME, reward_NAME, ppo_NAME: {' '.join(recipes)}", width)
    lines += ["", "Groups, written GROUP=NAME:", ""]
    for group, about in WORDS["groups"].items():
        note = f" ({about})" if about else ""
        lines += _row(group, f"{' '.join(choices(group))}{note}", width)
    return "\n".join(lines)


def _row(name: str, text: str, width: int) -> list[str]:
    first = f"  {name:<16}"
    return textwrap.wrap(
        text,
        width - 1,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )
