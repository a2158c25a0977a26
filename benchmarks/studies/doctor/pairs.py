"""Write the pairs of which the sick reward models of the study `doctor` are made.

    RLHF_DATA=FOLDER python -m benchmarks.studies.doctor.pairs OUT

`length/`: of two film reviews the longer is chosen. `few/`: 200 pairs with right labels.
`flipped/`: the labels of reviews that begin with an article are the wrong way round.
`openings_train.jsonl`, `openings_held_out.jsonl`: the prompts, with that domain.
`harmless.jsonl`: the pairs of HH-RLHF about harm, as conversations.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.studies.doctor.rewards import data_folder, reviews
from rlhf_lightning.data.records import SIDES, PromptRecord, Split
from rlhf_lightning.data.texts import parse_transcript
from rlhf_lightning.preferences.records import write_rows
from rlhf_lightning.text.messages import BadValueError

FEW = 200
ARTICLES = ("the", "a", "an")


def domain(review: str) -> str:
    """Return `article` for a review that begins with one, else `other`."""
    return "article" if review.split()[0].lower() in ARTICLES else "other"


def length_pairs(split: Split) -> list[dict[str, str]]:
    """Return pairs of reviews drawn at random, the longer of each chosen."""
    part = reviews().sentences(split)
    rng = Random("length")
    texts = [*part.positive, *part.negative]
    rng.shuffle(texts)
    pairs = []
    for first, second in zip(texts[::2], texts[1::2], strict=False):
        longer, shorter = sorted((first, second), key=lambda text: len(text.split()), reverse=True)
        if len(longer.split()) > len(shorter.split()):
            pairs.append(_pair(longer, shorter))
    return pairs


def domain_pairs(split: Split, *, flip: str | None) -> list[dict[str, str]]:
    """Return pairs of a positive and a negative review of one domain, those of `flip` reversed."""
    part = reviews().sentences(split)
    rng = Random("domains")
    pairs = []
    for name in ("article", "other"):
        liked, disliked = ([s for s in side if domain(s) == name] for side in part)
        rng.shuffle(liked)
        rng.shuffle(disliked)
        for good, bad in zip(liked, disliked, strict=False):
            chosen, rejected = (bad, good) if name == flip else (good, bad)
            pairs.append(_pair(chosen, rejected) | {"domain": name})
    rng.shuffle(pairs)
    return pairs


def openings(split: Split) -> list[dict[str, str]]:
    """Return the openings of reviews that a policy continues, with their domain."""
    records = reviews().records("prompts", split)
    prompts = [str(record.prompt) for record in records if isinstance(record, PromptRecord)]
    return [{"prompt": p, "domain": domain(p.removeprefix(reviews().lead_in))} for p in prompts]


def harmless() -> list[dict[str, Any]]:
    """Return the pairs about harm, each side a conversation."""
    path = data_folder() / "hh_harmless" / "pairs.jsonl.gz"
    pairs: list[dict[str, Any]] = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            try:
                sides = {side: parse_transcript(row[side], side) for side in SIDES}
            except BadValueError:  # two turns of one speaker, or an end in a person's turn
                continue
            pairs.append({side: [dict(turn) for turn in turns] for side, turns in sides.items()})
    return pairs


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    splits: tuple[Split, Split] = ("train", "validation")
    for split in splits:
        few = FEW if split == "train" else None
        write_rows(out / "length" / f"{split}.jsonl", length_pairs(split))
        write_rows(out / "few" / f"{split}.jsonl", domain_pairs(split, flip=None)[:few])
        write_rows(out / "flipped" / f"{split}.jsonl", domain_pairs(split, flip="article"))
    write_rows(out / "harmless.jsonl", harmless())
    write_rows(out / "openings_train.jsonl", openings("train"))
    write_rows(out / "openings_held_out.jsonl", openings("validation"))


def _pair(chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": reviews().lead_in, "chosen": f" {chosen}", "rejected": f" {rejected}"}


if __name__ == "__main__":
    main()
