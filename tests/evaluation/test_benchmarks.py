"""Benchmarks of reward models against hand-made files, and lm-eval on local tasks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rlhf_lightning.evaluation.benchmarks import (
    PairsBenchmark,
    RewardBench2,
    Scored,
    score_candidates,
    ties_metrics,
)
from rlhf_lightning.rollout.scorers.base import FunctionScorer
from tests.builders.models import tiny_tokenizer


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(subset: str, group: str, correct: list[str], wrong: list[str]) -> dict:
    return {
        "id": group, "prompt": f"question {group}", "chosen": correct, "rejected": wrong,
        "subset": subset, "num_correct": len(correct), "num_rejected": len(wrong),
    }  # fmt: skip


def scored_by(bench: RewardBench2, scores: dict[str, float]) -> list[Scored]:
    found = bench.candidates(chat=False)
    return [Scored(one, [scores[a] for a in one.answers], [1] * len(one.answers)) for one in found]


def test_a_best_of_four_is_right_where_the_correct_answer_is_alone_at_the_top(tmp_path):
    subset = "Math"
    rows = [row(subset, str(n), ["good"], ["bad", "worse", "worst"]) for n in range(12)]
    rows.append(row(subset, "x", ["bad"], ["good", "worse", "worst"]))
    rows.append(row(subset, "y", ["good"], ["equal", "worse", "worst"]))
    bench = RewardBench2(write(tmp_path / "set.jsonl", rows))
    scores = {"good": 2.0, "equal": 2.0, "bad": 1.0, "worse": 0.0, "worst": -1.0}
    found = bench.measure(scored_by(bench, scores))
    expected = (12 + 0 + 0.5) / 14
    assert found[f"benchmark/score/subset/{subset}"] == pytest.approx(expected)
    assert found[f"benchmark/num_prompts/subset/{subset}"] == 14
    assert found["benchmark/score"] == pytest.approx(expected)
    low, high = (found[f"benchmark/score_{end}/subset/{subset}"] for end in ("low", "high"))
    assert low < expected < high


def test_the_whole_is_the_mean_of_the_subsets_however_many_prompts_each_has(tmp_path):
    rows = [row("Math", str(n), ["good"], ["bad"]) for n in range(9)]
    rows += [row("Focus", "f", ["bad"], ["good"])]
    rows += [row("Ties", "ref:0", ["good"], ["bad"]), row("Ties", "tied:0", ["good"] * 2, ["bad"])]
    bench = RewardBench2(write(tmp_path / "set.jsonl", rows))
    found = bench.measure(scored_by(bench, {"good": 1.0, "bad": 0.0}))
    ties = found["benchmark/score/subset/Ties"]
    assert found["benchmark/score"] == pytest.approx((1 + 0 + ties) / 3)
    assert found["benchmark/num_subsets"] == 3


def tie(number: int, ref: list[float], tied: list[float], num_tied: int, tmp_path) -> list[Scored]:
    names = [f"{number}-{i}" for i in range(len(ref) + len(tied))]
    rows = [
        row("Ties", f"ref:{number}", names[:1], names[1 : len(ref)]),
        row("Ties", f"tied:{number}", names[len(ref) :][:num_tied], names[len(ref) + num_tied :]),
    ]
    bench = RewardBench2(write(tmp_path / f"{number}.jsonl", rows))
    return scored_by(bench, dict(zip(names, [*ref, *tied], strict=True)))


def test_ties_are_scored_as_the_repository_of_the_set_does(tmp_path):
    scored = [
        # Both right; correct answers within 1, above the wrong ones by 3, by 2 in the reference.
        *tie(0, [5.0, 3.0], [6.0, 5.0, 2.0], 2, tmp_path),
        # Both right; the spread of 4 is wider than the margin of 1.
        *tie(1, [5.0, 0.0], [6.0, 2.0, 1.0], 2, tmp_path),
        # The reference fails by 1; the tied prompt is right with a margin of 3 over a spread of 2.
        *tie(2, [1.0, 2.0], [6.0, 4.0, 1.0], 2, tmp_path),
    ]
    found = ties_metrics(scored)
    closeness = (math.tanh(2 / 1 - 1) + math.tanh(1 / 4 - 1) + math.tanh(-1 / 2 - 1)) / 3
    assert found["tied_accuracy"] == 1
    assert found["ref_accuracy"] == pytest.approx(2 / 3)
    assert found["preferred"] == pytest.approx(2 / 3)
    assert found["preferred_hard"] == pytest.approx(1 / 3)
    assert found["closeness"] == pytest.approx(closeness)
    expected = 0.3 * 1 + 0.3 * 2 / 3 + 0.2 * 2 / 3 + 0.2 / 3 + 0.01 * closeness
    assert found["score"] == pytest.approx(expected)


def test_a_tie_without_its_reference_is_refused(tmp_path):
    scored = tie(0, [1.0, 0.0], [1.0, 1.0, 0.0], 2, tmp_path)
    with pytest.raises(ValueError, match="without their counterpart, or twice: 0"):
        ties_metrics(scored[1:])


def test_a_pair_may_spell_a_control_token_lack_a_prompt_and_have_its_domain_as_subset(tmp_path):
    rows = [
        {"prompt": "w2 <eos> w3", "chosen": "w4 <eos>", "rejected": "w5", "domain": "one"},
        {"prompt": "", "chosen": "w6", "rejected": "w7 w8", "domain": "two"},
    ]
    found = PairsBenchmark(write(tmp_path / "pairs.jsonl", rows), subset="domain").candidates(
        chat=False
    )
    assert [(one.subset, one.prompt.prompt) for one in found] == [
        ("one", "w2 <eos> w3"),
        ("two", ""),
    ]
    scored = score_candidates(
        found[:1],
        FunctionScorer(lambda completions: [float(len(text)) for text in completions]),
        tiny_tokenizer(),
        max_prompt_length=20,
        batch_size=4,
        device=torch.device("cpu"),
    )
    assert scored[0].scores == [len("w4 <eos>"), 2.0]


def test_a_reward_function_gets_the_columns_of_the_pairs_that_it_ranks(tmp_path):
    row = {"prompt": "w2", "chosen": "w3 w4", "rejected": "w5"}
    rows = [row | {"answer": "w3 w4"}, row, row | {"answer": "w5"}]
    scored = score_candidates(
        PairsBenchmark(write(tmp_path / "pairs.jsonl", rows)).candidates(chat=False),
        FunctionScorer(
            lambda completions, answer: [
                float(text == right) for text, right in zip(completions, answer, strict=True)
            ]
        ),
        tiny_tokenizer(),
        max_prompt_length=20,
        batch_size=2,
        device=torch.device("cpu"),
    )
    assert [list(one.scores) for one in scored] == [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]


def test_a_subset_may_have_the_number_0_and_is_refused_where_no_pair_has_it(tmp_path):
    rows = [{"prompt": "w2", "chosen": "w3", "rejected": "w4", "level": n} for n in (0, 1, None)]
    path = write(tmp_path / "pairs.jsonl", rows)
    found = PairsBenchmark(path, subset="level").candidates(chat=False)
    assert [one.subset for one in found] == ["0", "1", ""]
    with pytest.raises(ValueError, match=r"no pair has .*subset='levle': name one of .*level"):
        PairsBenchmark(path, subset="levle").candidates(chat=False)


def test_a_response_without_a_score_is_not_counted_as_ranked_wrong(tmp_path):
    rows = [{"prompt": "w2", "chosen": "w3 w4", "rejected": "w5"} for _ in range(3)]
    with pytest.raises(ValueError, match="3 of 6 responses have no score"):
        score_candidates(
            PairsBenchmark(write(tmp_path / "pairs.jsonl", rows)).candidates(chat=False),
            FunctionScorer(
                lambda completions: [None if " " in text else 1.0 for text in completions]
            ),
            tiny_tokenizer(),
            max_prompt_length=20,
            batch_size=4,
            device=torch.device("cpu"),
        )


def test_pairs_are_scored_with_the_variables_that_they_are_learnt_with(tmp_path):
    prompt = [{"role": "user", "content": "q"}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in "ab")
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    kwargs = {"enable_thinking": False}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row | {"chat_template_kwargs": kwargs}))
    (pair,) = PairsBenchmark(path).candidates(chat=True)
    assert pair.prompt.variables == kwargs
