"""A task of language for lm-eval, which the study `commands` measures.

    python -m benchmarks.studies.blimp FILE.jsonl[.gz] FOLDER

writes the task `blimp_pairs`: the pairs of sentences of FILE, `chosen` the grammatical one and
`rejected` the other (BLiMP, Warstadt et al. 2020), every 67th of its 67,000.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from rlhf_lightning.data.files import checked_rows
from rlhf_lightning.preferences.records import write_rows
from rlhf_lightning.runs.atomic import write_text

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
