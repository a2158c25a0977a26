"""No reference case may be dropped in silence."""

import hashlib
import re
from pathlib import Path

import pytest

from tests.vectors.cases import FOLDER, load, topics, unused_entries

TESTS = Path(__file__).parents[1]
TESTED_BY = {
    "bradley_terry": "functional/test_vectors_losses.py",
    "distributed": "functional/test_vectors_distributed.py",
    "distillation": "functional/test_vectors_distillation.py",
    "diversity": "functional/test_vectors_statistics.py",
    "dpo": "functional/test_vectors_estimators.py",
    "effective_number": "functional/test_vectors_statistics.py",
    "estimators": "functional/test_vectors_estimators.py",
    "gae": "functional/test_vectors_advantages.py",
    "group_advantages": "functional/test_vectors_estimators.py",
    "kl": "functional/test_vectors_kl.py",
    "kl_bandit": "functional/test_vectors_kl.py",
    "kl_controller": "functional/test_vectors_kl.py",
    "kto": "functional/test_kto_loss.py",
    "masked_stats": "functional/test_vectors_masked.py",
    "off_policy": "functional/test_vectors_off_policy.py",
    "policy_loss": "functional/test_vectors_losses.py",
    "ppo_pipeline": "functional/test_vectors_pipeline.py",
    "response_mask": "functional/test_vectors_sequences.py",
    "rewards": "functional/test_vectors_rewards.py",
    "rm_last_index": "functional/test_vectors_sequences.py",
    "self_bleu": "functional/test_vectors_statistics.py",
    "seq_logprobs": "functional/test_vectors_logprobs.py",
    "sft": "functional/test_vectors_losses.py",
    "trust_region": "functional/test_vectors_trust_region.py",
    "value_loss": "functional/test_vectors_losses.py",
    "win_rate": "evaluation/test_win_rate.py",
}


@pytest.mark.parametrize("topic", topics())
def test_each_topic_is_tested_or_named_as_unused(topic: str):
    wholly_unused = all(case.wholly_unused() for case in load(topic))
    assert wholly_unused != (topic in TESTED_BY)


@pytest.mark.parametrize(("topic", "file"), TESTED_BY.items())
def test_the_registered_test_takes_every_case_of_its_topic(topic: str, file: str):
    source = (TESTS / file).read_text()
    # The case filter of pytest parameters is UNUSED.md alone, and `assert_matches` wants each key.
    tests = re.findall(rf'cases\("{topic}"\)\)\n(?:@.*\n)*def (test_\w+)', source)
    assert tests
    assert "assert_matches(case" in source


def test_unused_names_only_what_exists():
    assert len(unused_entries()) == (FOLDER / "UNUSED.md").read_text().count("\n| `")
    for topic, name, key in unused_entries():
        matching = [case for case in load(topic) if name in (case.name, "*")]
        assert matching, f"{topic}/{name} does not exist"
        assert key == "*" or any(key in case.expected for case in matching), f"{topic}/{name}/{key}"


def test_there_are_as_many_cases_as_were_delivered():
    assert len(topics()) == 26
    assert sum(len(load(topic)) for topic in topics()) == 160


def test_the_vectors_are_the_delivered_bytes():
    sums = dict(reversed(line.split()) for line in (FOLDER / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {f"{topic}.json" for topic in topics()}
    for name, digest in sums.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name
