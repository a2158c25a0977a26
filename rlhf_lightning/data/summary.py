"""Summary of the data, and warnings before training.

The summary has counts, lengths, duplicates, records left out and decoded examples. Warned of are
prompts in the wrong form, or read twice.
"""

from __future__ import annotations

import io
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text as Coloured
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.encode import (
    OVER_LONG,
    RESPONSE_TOO_LONG,
    Encoded,
    EncodedPreference,
    EncodedPrompt,
    EncodedSequence,
    EncodingReport,
)
from rlhf_lightning.data.records import Record, TextRecord
from rlhf_lightning.runs.metric_catalog import counted
from rlhf_lightning.text.decode import UNFINISHED, text_behind
from rlhf_lightning.text.messages import CONVERSATION, SYSTEM, Text
from rlhf_lightning.text.render import exchange, turn_end

LEARNT_OPEN, LEARNT_CLOSE = "[[", "]]"
# Neighbouring tokens have the two shades by turns.
TRAINED = ("black on green3", "black on dark_sea_green3")
MASKED = ("bright_white on grey30", "bright_white on grey42")


def length_summary(lengths: Sequence[int]) -> tuple[int, float, int, int]:
    """Return minimum, median, the smallest that 95 % do not exceed, and maximum."""
    ordered = sorted(lengths)
    rank = -(-95 * len(ordered) // 100)
    return ordered[0], statistics.median(ordered), ordered[rank - 1], ordered[-1]


@dataclass(kw_only=True)
class DataSummary(EncodingReport):
    """Summary of one split of the data: the report of its encoding, and what the rows hold.

    Args:
        name: title, e.g. `train preferences`.
        num_rows: number of encoded rows.
        domains: rows a domain; "" where a row has none.
        lengths: `length_summary` of the tokens of `prompt`, `response`, or of `chosen` and
            `rejected`, EOS included.
        labels: rows of each label, where rows have one.
        num_duplicates: rows whose tokens are those of an earlier row.
        num_contradictions: preferences that another row of the same prompt turns round, and
            responses that another row gives the other label.
        missing_columns: rows of prompts that lack a column which others have, by its name.
    """

    name: str
    num_rows: int
    domains: Mapping[str, int]
    lengths: Mapping[str, tuple[int, float, int, int]]
    labels: Mapping[bool, int]
    num_duplicates: int
    num_contradictions: int
    missing_columns: Mapping[str, int]

    def lines(self) -> dict[str, str]:
        """Return what there is to say by its name; what counts nothing is left out."""
        domains = {name or "(none)": n for name, n in self.domains.items()}
        contradictions = "pairs that another one contradicts (A > B and B > A)"
        rows: dict[str, Any] = {
            "rows": f"{self.num_rows}",
            **{f"rows that are {taken}": count for taken, count in self.taken.items()},
            "domains": domains if set(self.domains) - {""} else {},
            "labels": {str(label).lower(): n for label, n in self.labels.items()},
            **{
                f"{part} tokens, min / median / 95 % / max": " / ".join(f"{n:.10g}" for n in four)
                for part, four in self.lengths.items()
            },
            "duplicate rows": self.num_duplicates,
            "responses with both labels" if self.labels else contradictions: (
                self.num_contradictions
            ),
            "prompts cut from the left": self.num_truncated,
            "rows whose prompt ends in other tokens where it stands alone": self.num_merged,
            "rows with text unknown to the tokenizer (<unk>, or left out)": self.num_unknown,
            "keys of messages that the chat template does not read": self.unread,
            "columns that are not read (map them with columns=)": self.unread_columns,
            **{f"dropped: {reason}": count for reason, count in self.dropped.items()},
            "bad records skipped": len(self.skipped),
        }
        for name, value in rows.items():
            if isinstance(value, Mapping):
                rows[name] = ", ".join(f"{key} {count}" for key, count in value.items())
        return {name: str(value) for name, value in rows.items() if value}

    def render(self) -> str:
        """Return the lines as a compact table."""
        table = Table(title=self.name, show_header=False, title_justify="left")
        for row in self.lines().items():
            table.add_row(*row)
        width = min(shutil.get_terminal_size((100, 24)).columns, 100)
        console = Console(file=io.StringIO(), width=width, color_system=None)
        console.print(table)
        return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]


def summarize(
    encoded: Sequence[Encoded], *, name: str, kind: str = "", report: EncodingReport | None = None
) -> DataSummary:
    """Return the summary of encoded rows.

    Args:
        encoded: the rows of one split, all of one kind.
        name: title of the summary.
        kind: kind of the rows: `texts` have no prompt.
        report: what their `RecordEncoder` counted, and the bad records that were left out.
    """
    lengths: dict[str, list[int]] = {}
    for row in encoded:
        parts = {"text": len(row)} if kind == "texts" else part_lengths(row)
        for part, length in parts.items():
            lengths.setdefault(part, []).append(length)
    identities = {_identity(row) for row in encoded}
    asked = (row for row in encoded if isinstance(row, EncodedPrompt))
    lacking = (k for row in asked for k, v in row.columns.items() if v is None)
    labels = (getattr(row, "label", None) for row in encoded)
    return DataSummary(
        **vars(report or EncodingReport()),
        name=name,
        num_rows=len(encoded),
        domains=dict(Counter(row.domain for row in encoded).most_common()),
        lengths={part: length_summary(values) for part, values in lengths.items()},
        labels=Counter(label for label in labels if label is not None),
        num_duplicates=len(encoded) - len(identities),
        num_contradictions=sum(_identity(row, contrary=True) in identities for row in encoded),
        missing_columns=dict(Counter(name for name in lacking if name != CONVERSATION)),
    )


def held_out_rows(rows: Sequence[Encoded]) -> str:
    """Return how many rows are held out, of pairs with the number of their prompts."""
    pairs = [row for row in rows if isinstance(row, EncodedPreference)]
    prompts = len({pair.chosen_input_ids[: pair.prompt_length].tobytes() for pair in pairs})
    of = f" of {counted(prompts, 'prompt')}" if prompts < len(pairs) else ""
    return f"{len(rows):,}{of} held out"


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
    response, with its label: its other side is a response to another prompt.
    """
    shown = _sides(encoded[:n])
    return "\n".join(f"{title}: {_marked(ids, mask, tokenizer)}" for title, ids, mask in shown)


def coloured_examples(
    encoded: Sequence[Encoded], tokenizer: PreTrainedTokenizerBase, longest: int | None = None
) -> Iterator[Coloured]:
    """Yield each side of the rows, a colour for tokens that are learnt and one for the others.

    Args:
        encoded: the rows.
        tokenizer: decodes them.
        longest: most tokens of one colour that are shown in a row; the middle of more is left out.
    """
    for title, ids, mask in _sides(encoded):
        text = Coloured.assemble((f"{title}:\n", "bold"))
        for start, end in _runs(ids, mask):
            cut = (end, end)
            if longest is not None and end - start > longest:
                cut = (start + longest // 2, end - longest // 2)
            for first, last in ((start, cut[0]), (cut[1], end)):
                if first == cut[1] < end:
                    text.append(f" ... {cut[1] - cut[0]:,} tokens ... ", "italic")
                for number, token in enumerate(_tokens(ids, first, last, tokenizer)):
                    text.append(token, (TRAINED if mask[start] else MASKED)[number % 2])
        yield text


def _sides(encoded: Sequence[Encoded]) -> Iterator[tuple[str, Any, Any]]:
    """Yield title, ids and mask of what is learnt of each side of the rows."""
    for number, row in enumerate(encoded, start=1):
        label = getattr(row, "label", None)
        title = "" if label is None else f", label {str(label).lower()}"
        if isinstance(row, EncodedPreference):
            learnt = np.arange(len(row)) >= row.prompt_length
            sides = {title or ", chosen": row.chosen_input_ids}
            sides |= {} if title else {", rejected": row.rejected_input_ids}
        else:
            learnt = getattr(row, "loss_mask", np.zeros(len(row), dtype=bool))
            sides = {title: row.input_ids}
        for side, ids in sides.items():
            yield f"example {number}{side}", ids, learnt


def _runs(ids: Any, mask: Any) -> Iterator[tuple[int, int]]:
    """Yield start and end of the runs of tokens with the same mask."""
    changes = np.flatnonzero(np.diff(mask[: len(ids)])) + 1
    return pairwise([0, *changes.tolist(), len(ids)])


def _tokens(ids: Any, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the text of each token; several are one text where they write one character."""
    for stop in range(start + 1, end + 1):
        text = text_behind(ids[:start].tolist(), ids[start:stop].tolist(), tokenizer)
        if stop == end or not text.endswith(UNFINISHED):
            start = stop
            yield "".join(
                "\\n\n" if c == "\n" else c if c.isprintable() else repr(c)[1:-1] for c in text
            )


def _marked(ids: Any, mask: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode runs of tokens with the same mask, so that the marks are at token boundaries."""
    text = ""
    for start, end in _runs(ids, mask):
        run = text_behind(ids[:start].tolist(), ids[start:end].tolist(), tokenizer)
        text += f"{LEARNT_OPEN}{run}{LEARNT_CLOSE}" if mask[start] else run
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


def _identity(row: Encoded, *, contrary: bool = False) -> tuple[Any, ...]:
    """Return the identity of a row, or of one that says the contrary."""
    if isinstance(row, EncodedPreference):
        sides = row.chosen_input_ids.tobytes(), row.rejected_input_ids.tobytes()
        return sides[::-1] if contrary else sides
    label = getattr(row, "label", None)
    if contrary:
        label = "nothing" if label is None else not label
    return row.input_ids.tobytes(), label


# -- warnings ----------------------------------------------------------------------------------


def _warn(text: str) -> None:
    # Brings torch, which the rest of this module does without.
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn

    rank_zero_warn(text)


def warn_of_rows(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    summary: DataSummary,
    warn: Callable[[str], None] = _warn,
) -> None:
    """Say once what is odd in the training rows."""
    warn_of_plain_prompts(records, tokenizer, warn)
    warn_of_repeated_prompts(records, warn)
    is_chat = any(not isinstance(getattr(record, "prompt", ""), str) for record in records)
    end = exchange(tokenizer)[1].strip() if is_chat else ""
    if end and turn_end(tokenizer) is None:
        found = f"the chat template ends responses with {end!r}, which is no token of the tokenizer"
        fix = "add it to the tokenizer and the model, or set another model.chat_template"
        warn(f"{found}, so its letters are learnt and EOS behind them: {fix}")
    too_long = summary.dropped[OVER_LONG] + summary.dropped[RESPONSE_TOO_LONG]
    if too_long * 10 > (whole := summary.num_rows + summary.dropped.total()):
        fix = "raise data.max_length (of prompts data.max_prompt_length), or data.over_long"
        warn(f"{too_long:,} of {whole:,} rows are too long and left out: {fix}=truncate_left")
    for name, count in summary.missing_columns.items():
        found = f"{count} of {summary.num_rows} training prompts lack the column {name!r}"
        warn(f"{found}, which is None to the reward: fill it, or leave them out")


def warn_of_plain_prompts(
    records: Iterable[Record],
    tokenizer: PreTrainedTokenizerBase,
    warn: Callable[[str], None] = _warn,
) -> None:
    """Warn where prompts are plain text and the tokenizer has a chat template."""
    asked = [record for record in records if not isinstance(record, TextRecord)]
    has_template = bool(tokenizer.chat_template)
    plain = sum(isinstance(record.prompt, str) and not record.rendered for record in asked)
    if plain and has_template:
        found = f"{plain} of {len(asked)} rows are plain text, written without the chat template"
        fix = 'give messages ([{"role": "user", "content": ...}]) where the model is to chat'
        warn(f"{found} that the tokenizer has: {fix}")


def warn_of_repeated_prompts(
    records: Sequence[Record], warn: Callable[[str], None] = _warn
) -> None:
    """Warn where a response of every row begins with its prompt, which is then read twice."""
    if len(records) > 1 and all(map(_repeats_prompt, records)):
        found = f"in all {len(records)} rows a response begins with its prompt, which is read twice"
        warn(f"{found}: take it out of the responses")


def _repeats_prompt(record: Record) -> bool:
    asked: Text = getattr(record, "prompt", "")
    if not isinstance(asked, str):  # of several turns a response may quote the last one
        asked = tuple(message for message in asked if message["role"] not in SYSTEM)
        asked = asked if len(asked) == 1 else ""
    prompt = _last_text(asked)
    sides = (getattr(record, key, "") for key in ("completion", "chosen", "rejected"))
    return bool(prompt) and any(_last_text(side).startswith(prompt) for side in sides)


def _last_text(text: Text) -> str:
    text = text if isinstance(text, str) else text[-1]["content"]
    return " ".join(text.split()) if isinstance(text, str) else ""
