"""A look at the records of a source before training, without torch and without weights."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, get_args

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.encode import Encoded, EncodedPrompt, RecordEncoder, give_same_columns
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.kinds import to_kind
from rlhf_lightning.data.records import LossOn, Record, RecordKind, Split, kind_of
from rlhf_lightning.data.sources.base import RowSource
from rlhf_lightning.data.summary import length_summary, summarize, warn_of_rows

LEAST_LENGTH = 64  # smallest max_length that is tried
NUM_FAULTS = 10  # that are named


class Preview(NamedTuple):
    """The records that a stage would read.

    Args:
        kind: of the records.
        lines: names and texts: counts, lengths, what is odd, and each fault of bad records.
        rows: rows of the records, nothing dropped for its length.
    """

    kind: RecordKind
    lines: Sequence[tuple[str, str]]
    rows: Sequence[Encoded]


def preview(
    source: RowSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: RecordKind | None = None,
    max_length: int | None = None,
    loss_on: LossOn = "last",
    num_rows: int | None = None,
) -> Preview:
    """Read a source as a stage does, and return what it would get.

    Args:
        source: the source; with `on_bad_record="skip"` bad records are counted.
        tokenizer: makes ids of the records.
        kind: kind to read them as; None for the one that their keys say.
        max_length: most tokens of a row; None tries powers of two.
        loss_on: learnt part of a demonstration.
        num_rows: most records that are encoded, evenly spaced over the source; None for all.

    Raises:
        ValueError: if nothing can be read, or not as that kind.
    """
    parsed = [record for split in get_args(Split) for record in source.parsed(split)]
    own = kind_of(parsed[0])
    is_labelled = own == "demonstrations" and source.labels.column is not None
    kind = kind or ("unpaired" if is_labelled else own)
    if loss_on == "all" and kind != "demonstrations":
        raise ValueError(f"loss_on=all is of demonstrations alone: use last with {kind}")
    splits = {split: source.records(kind, split) for split in get_args(Split)}
    records = [record for split in splits.values() for record in split]
    count = min(len(records), num_rows or len(records))
    some = [records[n * len(records) // count] for n in range(count)]
    encoder = RecordEncoder(tokenizer, max_length=sys.maxsize, loss_on=loss_on)
    rows, report = encoder.encode_all(some), encoder.report
    give_same_columns(rows)
    report.skipped[:0] = source.skipped_records
    summary = summarize(rows, name=kind, kind=kind, report=report)
    odd: list[str] = []
    warn_of_rows(some, tokenizer, summary, odd.append)
    others = [k for k in get_args(RecordKind) if any(_reads(source, r, k) for r in parsed[:100])]
    columns = {name for row in rows if isinstance(row, EncodedPrompt) for name in row.columns}
    sizes = " and ".join(f"{len(found):,} {split}" for split, found in splits.items() if found)
    lines: dict[str, str] = {
        kind: (sizes or "none") + (f", {len(some):,} encoded" if len(some) < len(records) else ""),
        "kind= may also be": ", ".join(k for k in others if k != kind),
        **summary.lines(),
        **_lengths([len(row) for row in rows], max_length),
        "columns that a reward function is given": ", ".join(sorted(columns)),
    }
    faults = Counter(message.partition(": ")[2] for message in report.skipped)  # behind the place
    first = {message.partition(": ")[2]: message for message in reversed(report.skipped)}
    refused = ((f"refused, {n:,}", first[fault]) for fault, n in faults.most_common(NUM_FAULTS))
    told = (*lines.items(), *(("look at this", text) for text in odd), *refused)
    return Preview(kind, [(name, text) for name, text in told if text], rows)


def _reads(source: RowSource, record: Record, kind: RecordKind) -> bool:
    try:
        return bool(to_kind(record, kind, source.labels))
    except BadRecordError:
        return False


def _lengths(lengths: Sequence[int], max_length: int | None) -> dict[str, str]:
    """Return what there is to say of whole rows, and how many each limit would drop."""
    if not lengths:
        return {}
    limits = [max_length or LEAST_LENGTH]
    while max_length is None and limits[-1] < max(lengths):
        limits.append(2 * limits[-1])
    dropped = (f"{limit:,} drops {sum(n > limit for n in lengths):,}" for limit in limits)
    four = " / ".join(f"{n:.10g}" for n in length_summary(lengths))
    return {
        "whole row tokens, min / median / 95 % / max": four,
        "max_length": ", ".join(dropped),
    }
