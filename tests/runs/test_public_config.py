from __future__ import annotations

import pytest

from rlhf_lightning.runs.public_config import REMOVED, public_config, without_folders


def public(config, written=None):
    return public_config(config, config if written is None else written)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/home/me/models/sft", ".../sft"),
        ("~/models/sft", ".../sft"),
        ("~/sft", ".../sft"),
        ("/data", ".../data"),
        ("/home/my folder/a model/", ".../a model"),
        ("/home/me/rewards.py:score", ".../rewards.py:score"),
        ("data is at /mnt/x/y.jsonl, there", "data is at .../y.jsonl, there"),
        ("file:///home/me/a.jsonl", ".../a.jsonl"),
        (r"C:\Users\me\model", r".../model"),
        ("artifacts/demo/sft", "artifacts/demo/sft"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("a / b", "a / b"),
        ("either/or", "either/or"),
        ("{prompt}/no_think", "{prompt}/no_think"),
        ("{folder}/a/b/c", "{folder}/a/b/c"),
        ("5/3 and 1/2", "5/3 and 1/2"),
        ("", ""),
    ],
)
def test_of_a_path_its_last_part_stays_and_other_texts_stay_whole(text, kept):
    assert without_folders(text) == kept


def test_folders_of_the_machine_and_who_is_told_are_left_out():
    config = {
        "seed": 1,
        "paths": {"outputs": "/home/me/outputs"},
        "logger": {"project": "p"},
        "ckpt_path": "/x/y.ckpt",
        "resume": "auto",
        "dataset": {"path": "/home/me/pairs.jsonl", "rows": ["/a/b/c", 3, None, True]},
    }
    assert public(config) == {
        "seed": 1,
        "dataset": {"path": ".../pairs.jsonl", "rows": [".../c", 3, None, True]},
    }


@pytest.mark.parametrize(
    "key", ["api_key", "openai_api_key", "password", "hf_token", "token", "secret", "Authorization"]
)
def test_secrets_are_removed_by_their_keys(key):
    assert public({"scorer": {key: "abc"}}) == {"scorer": {key: REMOVED}}
    assert public({"scorer": {key: None}}) == {"scorer": {key: None}}


def test_what_comes_from_the_environment_stays_as_it_was_written():
    written = {
        "a": "${oc.env:HF_KEY}",
        "b": "${a}",
        "c": ["${oc.env:USER_NAME,}"],
        "d": "Bearer ${a}",
    }
    config = {"a": "hunter2hunter2", "b": "hunter2hunter2", "c": [""], "d": "Bearer hunter2hunter2"}
    made = public(config, written)
    assert made["a"] == made["b"] == made["d"] == "${oc.env:HF_KEY}"
    assert made["c"] == [""]
