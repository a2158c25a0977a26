"""Agreement of a judge behind an OpenAI-compatible endpoint with PandaLM's annotators.

    transformers serve MODEL --port 8011 --device cpu
    python -m benchmarks.judge_agreement --pandalm testset-v1.json --url http://127.0.0.1:8011/v1 \
        --model MODEL --journal judge.jsonl

Both orders of every pair are asked. Replies are kept in the journal, so the same command goes on
where it was stopped. Prints the figures as JSON; `--out FILE` writes them too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.public_sets import read_pandalm
from rlhf_lightning.preferences.agreement import Share
from rlhf_lightning.preferences.judge import JudgeAnnotator, Judgement, judge_figures
from rlhf_lightning.preferences.records import SIDES, Label, Pair
from rlhf_lightning.preferences.reliability import annotator_figures, people_majority

BATCH = 8  # pairs between two steps of the bar


def draw(pairs: Sequence[Pair], count: int | None, seed: int) -> list[Pair]:
    """Return so many pairs, drawn at random; all of them for None.

    A larger count adds to the pairs of a smaller one.
    """
    return random.Random(f"{seed}/judged").sample(pairs, len(pairs))[:count]


def ask(judge: JudgeAnnotator, pairs: Sequence[Pair]) -> list[Label]:
    """Return the judge's labels, and show a bar meanwhile."""
    labels: list[Label] = []
    for start in track(range(0, len(pairs), BATCH), f"labels by {judge.name}"):
        labels += judge.label(pairs[start : start + BATCH])
    return labels


def describe(
    labels: Sequence[Label],
    judgements: Sequence[Judgement],
    pairs: Sequence[Pair],
    people: Mapping[str, str],
) -> dict[str, Any]:
    """Return what the judge was like, beside the people's majority and the longer answer.

    Args:
        labels: of the judge, one a pair.
        judgements: its replies, two a pair.
        pairs: that it was asked about.
        people: pair id -> what most of them said.
    """
    judged = judge_figures(judgements)
    shares = {key: judged[key] for key in ("shown_first_wins", "consistent")}
    beside = annotator_figures(labels, people)
    orders = {}
    for order in SIDES:
        own = [j for j in judgements if j.order == order and j.verdict in SIDES]
        both = [j.verdict == people[j.pair_id] for j in own if people.get(j.pair_id) in SIDES]
        orders[order] = asdict(Share.of(sum(both), len(both)))
    decided = [pair for pair in pairs if people.get(pair.pair_id) in SIDES]
    gaps = [(p, len(p.first.split()) - len(p.second.split())) for p in decided]
    longer = [(gap > 0) == (people[p.pair_id] == "first") for p, gap in gaps if gap]
    return _plain(
        {
            "pairs": len(pairs),
            "people": dict(Counter(people.get(p.pair_id, "no majority") for p in pairs)),
            "labels": dict(Counter(label.choice for label in labels)),
            "agrees_with_people": beside["agrees"],
            "kappa_with_people": beside["kappa"],
            "agrees_in_one_order": orders,
            "longer_agrees_with_people": asdict(Share.of(sum(longer), len(longer))),
            "replies": judged | shares,
            "unreadable_share": judged["unreadable"] / max(judged["requests"], 1),
        }
    )


def _plain(value: Any) -> Any:
    """Return the value with null in place of what is not a number."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pandalm", type=Path, required=True, help="testset-v1.json")
    parser.add_argument("--url", required=True, help="of the endpoint, ends with /v1")
    parser.add_argument("--model", required=True, help="its name there")
    parser.add_argument("--name", default="judge", help="of the judge in the journal")
    parser.add_argument("--pairs", type=int, help="drawn at random; all by default")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--read", choices=("text", "logprobs"), default="text")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--journal", type=Path, required=True, help="keeps the replies")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    judged = read_pandalm(options.pandalm)
    people = people_majority(judged.labels)
    pairs = draw(judged.pairs, options.pairs, options.seed)
    judge = JudgeAnnotator(
        name=options.name,
        model=options.model,
        base_url=options.url,
        api_key_env=None,
        read=options.read,
        timeout=600.0,
        max_tokens=options.max_tokens,
        concurrency=options.concurrency,
    )
    judge.keep_in(options.journal)
    known = len(judge.judgements)
    started = time.perf_counter()
    labels = ask(judge, pairs)
    seconds = time.perf_counter() - started
    wanted = {pair.pair_id for pair in pairs}
    replies = [j for j in judge.judgements if j.pair_id in wanted]
    figures = describe(labels, replies, pairs, people)
    asked = len(judge.judgements) - known
    figures["seconds_a_request"] = seconds / asked if asked else None
    text = json.dumps(figures, indent=2) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
