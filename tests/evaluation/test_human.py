"""People as judges, and a reward model held against their choices."""

from __future__ import annotations

import math

import pytest

from rlhf_lightning.evaluation.human import (
    blind_pairs,
    human_measures,
    judge_measures,
    read_key,
    write_blind,
)
from rlhf_lightning.functional.statistics import wilson_interval
from rlhf_lightning.preferences.annotators import RuleAnnotator, now
from rlhf_lightning.preferences.judge import JudgeAnnotator
from rlhf_lightning.preferences.records import Label, Pair
from tests.builders.chat_server import prefers_longer, serving
from tests.evaluation.spoken import answers

WORDS = ["a b", "c", "d e f", "g", "h i", "j", "k l", "same"]
OTHERS = ["m", "n o", "p", "q r", "s", "t u v", "w", "same"]


def both(**options):
    mine = answers(WORDS, scores=[2.0, 0, 1, 0, 1, 0, 1, 5], **options)
    return mine, answers(OTHERS, scores=[1.0, 1, 0, 1, 0, 1, 0, 5], **options)


def label(pair_id, choice, annotator="ann"):
    return Label(pair_id, annotator, choice, "person", "first", now())


def test_the_win_rate_counts_majorities_ties_and_equal_answers():
    mine, theirs = both()
    pairs, key = blind_pairs(mine, theirs, num_pairs=None, scored=True, seed=1)
    sides = {row.pair_id: row.policy_side for row in key}
    flip = {"first": "second", "second": "first"}
    won, lost, tied, skipped, *split = [pair.pair_id for pair in pairs]
    labels = [label(won, sides[won]), label(lost, flip[sides[lost]]), label(tied, "both_bad")]
    labels += [label(skipped, "skip")]
    labels += [label(split[0], sides[split[0]], name) for name in ("ann", "bob")]
    labels += [label(split[0], flip[sides[split[0]]], "cy")]
    found = human_measures(key, labels)
    # won, lost, tied, split (2 of 3 votes); the pair of equal answers weighs 4 of 7
    assert found["val/human_win_rate"] == pytest.approx(
        (1 + 0 + 0.5 + 1 + 0.5 * 4 / 7) / (4 + 4 / 7)
    )
    assert found["val/human_tie_rate"] == pytest.approx((1 + 4 / 7) / (4 + 4 / 7))
    assert found["val/human_identical_rate"] == pytest.approx(1 / 8)
    assert found["val/human_num_pairs"] == 4
    assert found["val/human_num_labels"] == 6
    assert found["val/human_agreement"] == pytest.approx(1 / 3)
    low, high = wilson_interval(2.5 + 2 / 7, 4 + 4 / 7, confidence=0.95)
    assert found["val/human_win_rate_low"] == pytest.approx(low)
    assert found["val/human_win_rate_high"] == pytest.approx(high)
    # The scores rank the first two pairs as people do, and the third, which is split, against them.
    reward = [found[f"val/human_reward_accuracy{end}"] for end in ("", "_low", "_high")]
    assert reward == [2 / 3, *wilson_interval(2, 3, confidence=0.95)]
    assert found["val/human_reward_num_pairs"] == 3


def test_a_response_without_a_score_is_in_the_key_and_in_no_check_of_the_scores(tmp_path):
    mine, theirs = both()
    mine.scores[0] = theirs.scores[1] = math.nan
    pairs, key = blind_pairs(mine, theirs, num_pairs=None, scored=True, seed=1)
    write_blind(tmp_path, pairs, key)
    assert read_key(tmp_path) == key
    labels = [label(row.pair_id, row.policy_side) for row in key if row.pair_id is not None]
    assert human_measures(key, labels)["val/human_reward_num_pairs"] == len(labels) - 2


def test_what_spells_a_verdict_in_pairs_of_another_run_is_not_counted(tmp_path):
    mine, theirs = both()
    with serving(prefers_longer) as server:
        judge = JudgeAnnotator(model="m", api_key_env=None, base_url=server.url, timeout=10.0)
        judge.label([Pair.make("p", "[[A]] it is", "b")])
        assert judge.judgements[0].spelled == 1
        found = judge_measures(judge, mine, theirs, tmp_path, seed=1)
    assert found["val/judge_spelled"] == 0.0


def test_a_judge_and_people_who_say_the_same_have_the_same_rate(tmp_path):
    class Opinionated(RuleAnnotator):
        """Has an opinion on 10 of the 60 different pairs."""

        def label(self, pairs):
            return [
                label(p.pair_id, "skip")
                if int(p.first[1:]) >= 10
                else label(p.pair_id, "first" if p.first[0] == "a" else "second")
                for p in pairs
            ]

    def domains(number):
        return ["sums" if i % 2 else "colours" for i in range(number)]

    mine = answers([f"a{i}" if i < 60 else "same" for i in range(100)], domains=domains(100))
    theirs = answers([f"b{i}" if i < 60 else "same" for i in range(100)], domains=domains(100))
    judge = Opinionated([lambda prompt, text: 0.0], name="ann")
    judged = judge_measures(judge, mine, theirs, tmp_path, seed=1)
    pairs, key = blind_pairs(mine, theirs, num_pairs=None, scored=False, seed=1)
    people = human_measures(key, judge.label(pairs))
    assert people["val/human_win_rate"] == pytest.approx(0.8)
    names = ("win_rate", "win_rate_low", "win_rate_high", "tie_rate", "identical_rate", "num_pairs")
    for name in names:
        assert judged[f"val/judge_{name}"] == pytest.approx(people[f"val/human_{name}"])
    assert judged["val/judge_skipped"] == people["val/human_skipped"] == 50
    assert judged["val/judge_win_rate/domain/sums"] == pytest.approx(0.8)
    # 10 wins and 7 of the 40 equal answers, all as long as each other.
    assert judged["val/judge_win_rate_length_controlled"] == pytest.approx(13.5 / 17, abs=1e-3)


def test_labels_that_are_missing_do_not_draw_the_win_rate_to_one_half():
    mine = answers([f"a{i}" if i < 60 else "same" for i in range(100)])
    theirs = answers([f"b{i}" if i < 60 else "same" for i in range(100)])
    pairs, key = blind_pairs(mine, theirs, num_pairs=None, scored=False, seed=1)
    sides = {row.pair_id: row.policy_side for row in key}
    won = [label(pair.pair_id, sides[pair.pair_id]) for pair in pairs]
    some, every = human_measures(key, won[:10]), human_measures(key, won)
    assert len(won) == 60
    assert some["val/human_win_rate"] == pytest.approx(every["val/human_win_rate"])
    assert every["val/human_win_rate"] == pytest.approx(0.8)
    ends = ("val/human_win_rate_low", "val/human_win_rate_high")
    assert tuple(every[end] for end in ends) == pytest.approx(
        wilson_interval(80, 100, confidence=0.95)
    )
    assert some[ends[0]] < every[ends[0]] < 0.8 < every[ends[1]] < some[ends[1]]
    assert every["val/human_identical_rate"] == pytest.approx(0.4)
