"""What `rlhf-study commands` needs besides its data: a rule, and a task of language for lm-eval.

    python -m benchmarks.studies.commands FILE.jsonl[.gz] FOLDER

writes the task `blimp_pairs`: the pairs of sentences of FILE, `chosen` the grammatical one and
`rejected` the other (BLiMP, Warstadt et al. 2020), every 67th of its 67,000.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from rlhf_lightning.data.files import checked_rows
from rlhf_lightning.preferences.journal import write_rows
from rlhf_lightning.runs.atomic import write_text

PROGRAM = re.compile(r"^Program: (.+?)\. ", re.MULTILINE)
TASK = """task: blimp_pairs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: ""
doc_to_target: 0
doc_to_choice: "{{{{[chosen, rejected]}}}}"
metric_list: [{{metric: acc}}]
"""


def names_the_program(prompt: str, response: str) -> float:
    """Return 1.0 for a command that begins with the program that the prompt names, else 0.0.

    Pages of subcommands, such as `git-commit`, are named after program and subcommand.
    """
    named, words = PROGRAM.search(prompt), response.split()
    return float(
        named is not None
        and bool(words)
        and (named[1] == words[0] or named[1].startswith(f"{words[0]}-"))
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=67)
    options = parser.parse_args(arguments)
    file = options.folder.resolve() / "blimp_pairs.jsonl"
    rows = islice(checked_rows(options.file), 0, None, options.every)
    pairs = ({key: row[key] for key in ("chosen", "rejected")} for _, row in rows)
    write_rows(file, pairs)
    write_text(options.folder / "blimp_pairs.yaml", TASK.format(file=file))


if __name__ == "__main__":
    main()
