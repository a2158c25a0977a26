"""Summary of the data: counts, lengths, duplicates, records left out, and decoded examples."""

from __future__ import annotations

import io
import shutil
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import CONVERSATION
from rlhf_lightning.data.encode import (
    Encoded,
    EncodedPreference,
    EncodedPrompt,
    EncodedSequence,
    EncodingReport,
)
from rlhf_lightning.text.decoding import decoded, text_behind

LEARNT_OPEN, LEARNT_CLOSE = "[[", "]]"


@dataclass(frozen=True)
class LengthSummary:
    """Lengths in tokens. `percentile_95` is the smallest that at least 95 % do not exceed."""

    minimum: int
    median: float
    percentile_95: int
    maximum: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthSummary:
        """Return the summary of these lengths, at least one."""
        ordered = sorted(lengths)
        rank = -(-95 * len(ordered) // 100)
        return cls(ordered[0], statistics.median(ordered), ordered[rank - 1], ordered[-1])

    def __str__(self) -> str:
        """Return the four numbers in a line."""
        return f"{self.minimum} / {self.median:g} / {self.percentile_95} / {self.maximum}"


@dataclass(kw_only=True)
class DataSummary(EncodingReport):
    """Summary of one split of the data: the report of its encoding, and what the rows hold.

    Args:
        name: title, e.g. `train preferences`.
        num_rows: number of encoded rows.
        domains: rows a domain; "" where a row has none.
        lengths: token lengths of `prompt`, `response`, or of `chosen` and `rejected`, EOS included.
        labels: rows of each label, where rows have one.
        num_duplicates: rows whose tokens are those of an earlier row.
        num_contradictions: preferences that another row of the same prompt turns round, and
            responses that another row gives the other label.
        missing_columns: rows of prompts that lack a column which others have, by its name.
    """

    name: str
    num_rows: int
    domains: Mapping[str, int]
    lengths: Mapping[str, LengthSummary]
    labels: Mapping[bool, int]
    num_duplicates: int
    num_contradictions: int
    missing_columns: Mapping[str, int]

    def render(self, but: Collection[str] = ()) -> str:
        """Return a compact table as text, without the unread columns and keys in `but`."""
        domains = {name or "(none)": n for name, n in self.domains.items()}
        unread, unread_columns = (
            {key: n for key, n in counts.most_common() if key not in but}
            for counts in (self.unread, self.unread_columns)
        )
        contradictions = "pairs that another one contradicts (A > B and B > A)"
        rows: dict[str, Any] = {
            "domains": domains if set(self.domains) - {""} else {},
            "labels": {str(label).lower(): n for label, n in self.labels.items()},
            **{f"{k} tokens, min / median / 95 % / max": str(v) for k, v in self.lengths.items()},
            "duplicate rows": str(self.num_duplicates),
            "responses with both labels" if self.labels else contradictions: (
                self.num_contradictions
            ),
            "prompts cut from the left": self.num_truncated,
            "rows whose prompt ends in other tokens where it stands alone": self.num_merged,
            "rows with text unknown to the tokenizer (<unk>, or left out)": self.num_unknown,
            "keys of messages that the chat template does not read": unread,
            "columns that are not read (map them with columns=)": unread_columns,
            **{
                f"rows without {name!r}, which is None to the reward": count
                for name, count in self.missing_columns.items()
            },
            **{f"dropped: {reason}": count for reason, count in self.dropped.items()},
            "bad records skipped": len(self.skipped),
        }
        table = Table(title=self.name, show_header=False, title_justify="left")
        table.add_row("rows", f"{self.num_rows}")
        for name, value in rows.items():
            if isinstance(value, Mapping):
                value = ", ".join(f"{key} {count}" for key, count in value.items())
            if value:
                table.add_row(name, str(value))
        return render_table(table)


def summarize(
    encoded: Sequence[Encoded],
    *,
    name: str,
    report: EncodingReport | None = None,
    skipped: Sequence[str] = (),
) -> DataSummary:
    """Return the summary of encoded rows.

    Args:
        encoded: the rows of one split, all of one kind.
        name: title of the summary.
        report: what `encode_all` said about them.
        skipped: messages about bad records that were left out.
    """
    report = report or EncodingReport()
    lengths: dict[str, list[int]] = {}
    for row in encoded:
        for part, length in part_lengths(row).items():
            lengths.setdefault(part, []).append(length)
    identities = {_identity(row) for row in encoded}
    asked = (row for row in encoded if isinstance(row, EncodedPrompt))
    lacking = (k for row in asked for k, v in row.columns.items() if v is None)
    return DataSummary(
        **{**vars(report), "skipped": [*skipped, *report.skipped]},
        name=name,
        num_rows=len(encoded),
        domains=dict(Counter(row.domain for row in encoded).most_common()),
        lengths={part: LengthSummary.of(values) for part, values in lengths.items()},
        labels=Counter(label for row in encoded if (label := _label(row)) is not None),
        num_duplicates=len(encoded) - len(identities),
        num_contradictions=sum(_contrary(row) in identities for row in encoded),
        missing_columns=dict(Counter(name for name in lacking if name != CONVERSATION)),
    )


def data_counts(summaries: Sequence[DataSummary]) -> dict[str, float]:
    """Return the anomalies in a run's data as metrics, `data/*`; a count of 0 is left out.

    Args:
        summaries: one summary per split.
    """
    counts = {
        "data/contradicting_pairs": sum(s.num_contradictions for s in summaries),
        "data/merged_boundaries": sum(s.num_merged for s in summaries),
        "data/bad_records_skipped": sum(len(s.skipped) for s in summaries),
    }
    return {name: float(count) for name, count in counts.items() if count}


def render_examples(encoded: Sequence[Encoded], tokenizer: PreTrainedTokenizerBase, n: int) -> str:
    """Return the first `n` rows decoded, special tokens and all; what is learnt is in `[[...]]`.

    A preference shows both sides, with the scored responses in the brackets; an unpaired row its
    response, with its label.
    """
    lines = []
    for number, row in enumerate(encoded[:n], start=1):
        if isinstance(row, EncodedSequence):
            label = "" if row.label is None else f", label {str(row.label).lower()}"
            text = _marked(row.input_ids, row.loss_mask, tokenizer)
            lines.append(f"example {number}{label}: {text}")
        elif isinstance(row, EncodedPrompt):
            lines.append(f"example {number}: {decoded(row.input_ids, tokenizer)}")
        else:
            sides = {"chosen": row.chosen_input_ids, "rejected": row.rejected_input_ids}
            if row.label is not None:  # the other side is a response to another prompt
                sides = {f"label {str(row.label).lower()}": row.chosen_input_ids}
            for side, ids in sides.items():
                mask = [i >= row.prompt_length for i in range(len(ids))]
                lines.append(f"example {number}, {side}: {_marked(ids, mask, tokenizer)}")
    return "\n".join(lines)


def render_table(table: Table) -> str:
    """Return a rich table as plain text, as wide as the terminal, at most 100 columns."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]


def _marked(ids: Any, mask: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode runs of tokens with the same mask, so that the marks are at token boundaries."""
    text, start = "", 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or bool(mask[end]) != bool(mask[start]):
            run = text_behind(ids[:start].tolist(), ids[start:end].tolist(), tokenizer)
            text += f"{LEARNT_OPEN}{run}{LEARNT_CLOSE}" if mask[start] else run
            start = end
    return text


def part_lengths(row: Encoded) -> dict[str, int]:
    """Return the tokens of each part of a row: prompt, response, chosen, rejected."""
    if isinstance(row, EncodedPrompt):
        return {"prompt": len(row)}
    if isinstance(row, EncodedSequence):
        response = int(row.loss_mask.sum())
        return {"prompt": len(row) - response, "response": response}
    return {
        "prompt": row.prompt_length,
        "chosen": len(row.chosen_input_ids) - row.prompt_length,
        "rejected": len(row.rejected_input_ids) - row.prompt_length,
    }


def _label(row: Encoded) -> bool | None:
    return getattr(row, "label", None)


def _identity(row: Encoded) -> tuple[bytes, ...]:
    if isinstance(row, EncodedPreference):
        return row.chosen_input_ids.tobytes(), row.rejected_input_ids.tobytes()
    label = _label(row)
    return row.input_ids.tobytes(), *(() if label is None else (str(label).encode(),))


def _contrary(row: Encoded) -> tuple[bytes, ...] | None:
    """Return the identity of a row that says the opposite; None of one that says nothing."""
    if isinstance(row, EncodedPreference):
        return _identity(row)[::-1]
    label = _label(row)
    return None if label is None else (row.input_ids.tobytes(), str(not label).encode())
