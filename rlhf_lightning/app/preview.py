"""A look at the records of a file before training: `rlhf-data FILE model=FOLDER`."""

from __future__ import annotations

import io
import logging
from html import escape

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.app.command_line import run_command, say
from rlhf_lightning.app.config.commands import PreviewSettings
from rlhf_lightning.app.failures import refusing
from rlhf_lightning.data.preview import Preview, preview
from rlhf_lightning.data.sources import base
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.data.summary import MASKED, TRAINED, coloured_examples, render_examples
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.text.tokenizers import load_tokenizer

LONGEST = 80  # tokens of one colour in a terminal
# Rich fills in {code}, with its text escaped; colours of a token are its own. FILE is its name.
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>FILE, read by rlhf-data</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>:root {{color-scheme: light dark}}
h1, pre {{white-space: pre-wrap; overflow-wrap: anywhere; margin: 1em; font: 14px/1.6 monospace}}
h1 {{font-weight: bold}}
</style></head><body><h1>FILE, read by rlhf-data</h1><pre>{code}</pre></body></html>
"""


def print_preview(
    found: Preview, tokenizer: PreTrainedTokenizerBase, num_examples: int, console: Console
) -> None:
    """Print what would be read, and the first rows; on a page these are whole."""
    is_page, shown = console.record, found.rows[:num_examples]
    for name, text in found.lines:
        row = Text.assemble((f"{name}: ", "bold"), text)
        console.print(row, soft_wrap=is_page or not console.is_terminal)
    if not shown:
        return
    if console.color_system is None or console.no_color:
        text = render_examples(shown, tokenizer, len(shown))
        marks = "" if found.kind == "prompts" else "in the loss: [[...]]\n"
        console.print(Text(f"\n{marks}{text}"), soft_wrap=True)
        return
    trained, masked = (" trained ", TRAINED[0]), (" masked ", MASKED[0])
    legend = Text.assemble("\n", trained, " in the loss ", masked, " attended, not in the loss")
    for each in (legend, *coloured_examples(shown, tokenizer, None if is_page else LONGEST)):
        console.print(each, soft_wrap=is_page)


def _show(settings: PreviewSettings) -> None:
    logging.getLogger(base.__name__).setLevel(logging.ERROR)  # what is skipped is listed
    given = settings.model_dump()
    of_source = ("columns", "label_good", "rendered", "system_into_user")
    options = {name: given[name] for name in of_source}
    with refusing(ValueError, TypeError):
        source = FileSource(settings.path, **options, validation_fraction=0.0, on_bad_record="skip")
        source.parsed("train")  # before a model is looked for
        tokenizer = load_tokenizer(**given["model"])
        names = ("kind", "max_length", "loss_on", "num_rows")
        found = preview(source, tokenizer, **{name: given[name] for name in names})
    print_preview(found, tokenizer, settings.num_examples, Console())
    if settings.html is not None:
        hidden = io.StringIO()
        page = Console(file=hidden, record=True, color_system="truecolor", no_color=False)
        print_preview(found, tokenizer, settings.num_examples, page)
        text = page.export_html(code_format=PAGE, inline_styles=True)
        write_text(settings.html, text.replace("FILE", escape(str(settings.path)), 2))
        say(f"page: {settings.html}")


def main() -> None:
    """Run the command line."""
    run_command("preview", _show)
