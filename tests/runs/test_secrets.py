"""Secrets are told by their key or their form, and removed wherever they turn up."""

from __future__ import annotations

import json
import logging
import time

import pytest
import yaml

from rlhf_lightning.preferences.judge_service import JudgeHparams, JudgeService
from rlhf_lightning.rollout.scorers.http import HttpScorer
from rlhf_lightning.runs import secrets
from rlhf_lightning.runs.secrets import (
    REMOVED,
    RedactingFilter,
    is_secret,
    learn_secrets,
    redact_files,
    redacted,
    without_secrets,
)

# Put together here, so that nothing that looks like one stands in the repository.
HF = "hf_" + "aB3" * 11
OPENAI = "sk-" + "proj-" + "x9Y" * 8
WANDB = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("password", "x"),
        ("db_password", "hunter"),
        ("api_key", "abc"),
        ("OPENAI_API_KEY", "abc"),
        ("hf_token", "abc"),
        ("access_token", "abc"),
        ("token", "abc"),
        ("client_secret", "abc"),
        ("Authorization", "Basic abc"),
        ("headers", {"X": "abc"}),
        ("private_key", "abc"),
        ("my_key", "a1b2c3d4e5f6g7h8"),
        ("wandb", WANDB),
    ],
)
def test_a_secret_is_told_by_its_key(key, value):
    assert is_secret(key, value)
    assert without_secrets("", {"scorer": [{key: value}]}) == {"scorer": [{key: REMOVED}]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_new_tokens", 40),
        ("tokenizer", "org/name"),
        ("num_tokens", "12"),
        ("eos_token", "<eos>"),
        ("pad_token", "<pad>"),
        ("token_env", "REWARD_TOKEN"),
        ("sort_key", "score"),
        ("answer_key", "final_answer"),
        ("revision", WANDB),
        ("commit", WANDB),
        ("fingerprint", WANDB),
        ("api_key", "${oc.env:OPENAI_API_KEY}"),
        ("password", None),
        ("secret", ""),
        ("url", "???"),
        ("seed", 1),
        ("keep_last", 2),
        ("monkey", "bananas"),
    ],
)
def test_what_only_sounds_like_one_stays(key, value):
    assert not is_secret(key, value)
    assert without_secrets("", {key: value}) == {key: value}


@pytest.mark.parametrize("secret", [HF, OPENAI, "ghp_" + "a1" * 18, "AKIA" + "ABCD1234" * 2])
def test_a_secret_is_told_by_its_form_inside_any_text(secret):
    assert redacted(f"401 for {secret}, sorry") == f"401 for {REMOVED}, sorry"
    assert without_secrets("", {"note": f"use {secret}"}) == {"note": f"use {REMOVED}"}


def test_what_was_learnt_is_removed_everywhere():
    learn_secrets(
        {"scorer": {"headers": {"X-Auth": "open sesame"}}},
        environment={"MY_PASSWORD": "tomato-soup", "HOME": "/root", "SHORT_TOKEN": "abc"},
    )
    assert redacted("open sesame and tomato-soup in /root, abc") == (
        f"{REMOVED} and {REMOVED} in /root, abc"
    )


def test_files_of_others_are_cleaned_in_place(tmp_path):
    file, other = tmp_path / "config.yaml", tmp_path / "plain.yaml"
    file.write_text(f"scorer:\n  token: {HF}\n  password: 'tomato soup'\nseed: 1\n")
    other.write_text("seed: 1\n")
    stamp = other.stat().st_mtime_ns
    learn_secrets({"scorer": {"token": HF, "password": "tomato soup"}}, environment={})
    redact_files(file, other, tmp_path / "missing.yaml")
    assert file.read_text() == f"scorer:\n  token: {REMOVED}\n  password: {REMOVED}\nseed: 1\n"
    assert other.stat().st_mtime_ns == stamp


SHORT = {
    "one letter": ({"scorer": {"secret": "a"}}, {"artifacts": "artifacts", "fast": False}),
    "truth value": ({"headers": True}, {"fused": True}),
    "number": ({"password": 1}, {"seed": 11}),
    "number as text": ({"password": "1"}, {"seed": 11, "name": "run-1"}),
    "column map": ({"columns": {"headers": "prompt"}}, {"prompt": "prompt"}),
    "plain word": ({"secret": "complete"}, {"note": "incomplete or complete"}),
    "several words": ({"password": "to be"}, {"note": "to do"}),
    "several lines": ({"private_key": "one\ntwo\n"}, {"note": "one"}),
    "below headers": ({"headers": {"X-Auth": "abc", "n": [1, "d"]}}, {"abc": "abcd"}),
}


@pytest.mark.parametrize(("config", "rest"), SHORT.values(), ids=SHORT)
def test_behind_a_secret_key_only_that_place_is_removed(config, rest, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config | {"rest": rest, "last": "x"}, sort_keys=False))
    learn_secrets(config, environment={})
    redact_files(file)
    after = yaml.safe_load(file.read_text())
    assert after["rest"] == rest
    assert after["last"] == "x"
    left = [text for text in secrets._secret_values("", after) if text != REMOVED]
    assert left == []


@pytest.mark.parametrize(
    "text",
    [
        "the stop token: 2, of 22",
        "the answer ends before the stop token: incomplete, of 3 complete ones",
        "token=2 and password=12, of 212",
        "headers={} and secret=null, {none}",
        "api_key=${oc.env:MY_KEY}",
    ],
)
def test_plain_text_stays_as_it_is(text):
    learn_secrets({"secret": "complete", "password": "123456"}, environment={"MY_TOKEN": "answer"})
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("+scorer.secret=a data=artifacts", f"+scorer.secret={REMOVED} data=artifacts"),
        ('{"api_key": "abc", "a": "abc"}', f'{{"api_key": "{REMOVED}", "a": "abc"}}'),
        ("+x.headers={X-Auth: abc} seed=1", f"+x.headers={REMOVED} seed=1"),
        ("+x.password='to be' or not to be", f"+x.password='{REMOVED}' or not to be"),
        ("the hub's token: a1b2c3d4e5f6g7h8i9", f"the hub's token: {REMOVED}"),
        ("Authorization: Basic dXNlcjpodW50", f"Authorization: {REMOVED}"),
        ("PGPASSWORD=hunter2 passwords=['ab1']", f"PGPASSWORD={REMOVED} passwords={REMOVED}"),
        (r"password='it\'s mine' x", f"password='{REMOVED}' x"),
        ("postgres://me:hunter2@host/db", f"postgres://{REMOVED}@host/db"),
        ("key eyJhbGciOiJI.eyJzdWIiOiIx.abcdefghij.", f"key {REMOVED}."),
        ("-----BEGIN PRIVATE KEY-----\nMII\n-----END PRIVATE KEY-----\n", f"{REMOVED}\n"),
    ],
)
def test_an_assigned_secret_is_removed_where_it_stands(text, clean):
    assert redacted(text) == clean


@pytest.mark.parametrize("secret", ["pass,'x\"y1", "äöüß1234", "line1\nline2"])
def test_a_known_secret_is_removed_as_tracebacks_and_json_write_it(secret):
    learn_secrets({"password": secret}, environment={})
    assert redacted(f"it was {secret}.") == f"it was {REMOVED}."
    for text in (repr(secret), ascii(secret), json.dumps(secret)):
        assert redacted(f"it was {text}.") == f"it was {text[0]}{REMOVED}{text[0]}."


def test_a_known_secret_is_no_part_of_another_word():
    learn_secrets({"password": "open-7"}, environment={})
    assert redacted("reopen-7, open-73, open-7.") == f"reopen-7, open-73, {REMOVED}."


def test_keys_that_are_read_for_a_service_are_known(monkeypatch):
    monkeypatch.setenv("MY_SERVICE", "tomato-soup-1")
    monkeypatch.setenv("MY_OTHER", "tomato-soup-2")
    judge = JudgeHparams(base_url="http://127.0.0.1:9/v1", model="m", api_key_env="MY_SERVICE")
    JudgeService(judge)
    HttpScorer(url="http://127.0.0.1:9", token_env="MY_OTHER")
    assert redacted("401 tomato-soup-1 tomato-soup-2") == f"401 {REMOVED} {REMOVED}"


def test_log_records_lose_their_secrets(caplog):
    caplog.handler.addFilter(RedactingFilter())
    logging.getLogger("d3").warning("the hub said no to %s after %d tries", HF, 3)
    assert caplog.messages == [f"the hub said no to {REMOVED} after 3 tries"]


@pytest.mark.parametrize("style", ["|", ">-", "|2+"])
def test_a_text_of_several_lines_is_removed_and_what_follows_stays(style, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"a:\n  api_key: {style}\n    one\n    two\n\n  next: 2\nlast: 3\n")
    redact_files(file)
    assert yaml.safe_load(file.read_text()) == {"a": {"api_key": REMOVED, "next": 2}, "last": 3}


@pytest.mark.parametrize("unit", ["a-", "/", "x.y@"])
def test_a_long_text_is_searched_in_a_moment(unit):
    started = time.perf_counter()
    assert redacted(unit * 20_000) == unit * 20_000
    assert time.perf_counter() - started < 2
