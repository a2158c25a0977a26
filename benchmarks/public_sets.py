"""Public sets of people's judgements as pairs and labels: PandaLM's test set and UKPConvArg1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.datasets.argument_pairs import ArgumentPairSource
from rlhf_lightning.data.errors import BadRecordError, describe
from rlhf_lightning.data.files import checked_rows
from rlhf_lightning.preferences.annotators import now
from rlhf_lightning.preferences.records import Choice, Label, Pair

SAME = "both responses are the same text"
REPEATED = "the same pair stands there twice"


@dataclass(frozen=True)
class JudgedSet:
    """Pairs with what people said of them.

    Args:
        pairs: each once.
        labels: of people.
        verdicts: pair id -> the set's own verdict, `first`, `second` or `tie`, where it has one.
        left_out: pairs that were not taken, by reason.
        row_counts: votes for first, second and tie of every row of the file, left out or not.
    """

    pairs: tuple[Pair, ...]
    labels: tuple[Label, ...]
    verdicts: Mapping[str, str]
    left_out: Mapping[str, int]
    row_counts: tuple[tuple[int, int, int], ...]


def read_pandalm(path: str | Path) -> JudgedSet:
    """Return PandaLM's test set: two answers to an instruction, and what three people said.

    The file is a list of objects with `instruction`, `input`, `response1`, `response2` and
    `annotator1` to `annotator3`, each 0 (tie), 1 or 2.

    Raises:
        BadRecordError: for a row that cannot be read.

    Source: Wang et al. 2023, "PandaLM: an automatic evaluation benchmark for LLM instruction tuning
    optimization".
    """
    pairs: dict[str, Pair] = {}
    labels: list[Label] = []
    left_out: Counter[str] = Counter()
    row_counts: list[tuple[int, int, int]] = []
    choices: tuple[Choice, ...] = ("tie", "first", "second")
    for where, row in checked_rows(Path(path)):
        texts = [_text(row.get(k)) for k in ("instruction", "input", "response1", "response2")]
        votes: list[Any] = [row.get(f"annotator{n}") for n in (1, 2, 3)]
        if None in texts or any(v not in (0, 1, 2) for v in votes):
            found = f"the row holds {describe(dict(row))}"
            fix = "give instruction, input, response1, response2 and annotator1 to 3 of 0, 1 or 2"
            raise BadRecordError(where, found, fix)
        row_counts.append((votes.count(1), votes.count(2), votes.count(0)))
        instruction, given, first, second = (str(t).strip() for t in texts)
        if first == second:
            left_out[SAME] += 1
            continue
        prompt = f"{instruction}\n\n{given}" if given else instruction
        source = str(row.get("cmp_key", "_")).split("_")
        pair = Pair.make(
            prompt,
            first,
            second,
            domain=str(row.get("motivation_app", "")),
            first_source=source[0],
            second_source=source[-1],
        )
        if pair.pair_id in pairs:
            left_out[REPEATED] += 1
            continue
        pairs[pair.pair_id] = pair
        labels += [_label(pair, f"annotator{n}", choices[v]) for n, v in enumerate(votes, start=1)]
    return JudgedSet(tuple(pairs.values()), tuple(labels), {}, dict(left_out), tuple(row_counts))


def read_arguments(folder: str | Path) -> JudgedSet:
    """Return UKPConvArg1: which of two arguments convinces more, by five people each.

    The folder is that of `ArgumentPairSource`. Votes carry the name of the worker; the set's own
    verdicts weigh workers by how far they agree with others (MACE).

    Raises:
        BadRecordError: for a row that cannot be read.

    Source: Habernal and Gurevych 2016, "Which argument is more convincing?".
    """
    source = ArgumentPairSource(folder)
    names: dict[str, Choice] = {"a1": "first", "a2": "second", "equal": "tie"}
    pairs: dict[str, Pair] = {}
    labels: list[Label] = []
    verdicts: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    row_counts: list[tuple[int, int, int]] = []
    for judged in source.pairs("train"):
        votes = judged.votes
        row_counts.append((votes.count("a1"), votes.count("a2"), votes.count("equal")))
        if judged.first.text == judged.second.text:
            left_out[SAME] += 1
            continue
        prompt = f"Debate: {judged.title}\nSide taken: {judged.first.side}"
        pair = Pair.make(prompt, judged.first.text, judged.second.text, domain=judged.topic)
        if pair.pair_id in pairs:
            left_out[REPEATED] += 1
            continue
        pairs[pair.pair_id] = pair
        if judged.gold is not None:
            verdicts[pair.pair_id] = names[judged.gold]
        voters = judged.voters or tuple(f"vote {n}" for n in range(len(votes)))
        labels += [_label(pair, who, names[v]) for who, v in zip(voters, votes, strict=True)]
    return JudgedSet(
        tuple(pairs.values()), tuple(labels), verdicts, dict(left_out), tuple(row_counts)
    )


def _text(value: object) -> str | None:
    # Six of the answers are the truth value True: they were "True" before a tool wrote the file.
    return str(value) if isinstance(value, str | bool) else None


def _label(pair: Pair, annotator: str, choice: Choice) -> Label:
    # Neither set says which answer was shown first, nor when.
    return Label(pair.pair_id, annotator, choice, "person", "first", now())
