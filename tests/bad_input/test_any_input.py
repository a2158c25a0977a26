"""Any value for any key, and any row of a file: taken, or refused in one line that says where."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, flag_override

from rlhf_lightning.app.build import check_run
from rlhf_lightning.app.config.compose import ConfigError, composed, register
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import read_settings
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.formats import KNOWN_KEYS
from rlhf_lightning.data.kinds import to_kind
from rlhf_lightning.data.records import ROLES, Record, kind_of, text_key
from tests.builders.located_rows import source_of

# The same examples in every run, however slow the machine is.
DRAWN = settings(
    derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@cache
def configuration(stage: str) -> DictConfig:
    register()
    cfg = composed("train", [f"+experiment={stage}"])
    cfg.hydra = None
    return cfg


def keys(node: Any, where: str = "") -> list[str]:
    found = []
    for key in node:
        leaf = OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key)
        inside = not leaf and OmegaConf.is_dict(node[key])
        found += keys(node[key], f"{where}{key}.") if inside else [f"{where}{key}"]
    return sorted(found)


WORDS = st.text("abcdefz_-./: 0123456789", max_size=12)
NUMBERS = st.integers(-3, 300) | st.integers() | st.floats()
SMALL = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers() | WORDS, max_size=2)
LISTS = st.lists(st.integers(-2, 5) | WORDS, max_size=3)
VALUES = st.none() | st.booleans() | NUMBERS | WORDS | LISTS | SMALL
PLACES = st.sampled_from(("sft", "reward", "ppo")).flatmap(
    lambda stage: st.tuples(st.just(stage), st.sampled_from(keys(configuration(stage))))
)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(DRAWN, max_examples=60)
@given(PLACES, VALUES)
def test_any_value_is_taken_or_refused_by_its_name(place, value):
    stage, key = place
    cfg = copy.deepcopy(configuration(stage))
    with flag_override(cfg, "struct", False):
        OmegaConf.update(cfg, key, value, merge=False)
    try:
        check_run(read_settings(TrainSettings, cfg))
    except ConfigError as error:
        text = str(error)
        assert "\n" not in text
        assert any(part in text for part in key.split("."))
        assert len(text) < 6000


# JSON may spell half of a surrogate pair, which no file can hold as UTF-8.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT
ROLE, CONTENT = st.sampled_from(ROLES) | ANY_TEXT, ANY_TEXT | PLAIN
OPTIONAL = {"role": ROLE, "content": CONTENT, "name": PLAIN}
MESSAGE = st.fixed_dictionaries({}, optional=OPTIONAL)
ANYTHING = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3)
)
CELL = ANY_TEXT | st.lists(MESSAGE, max_size=4) | ANYTHING
KEY = st.sampled_from(KNOWN_KEYS) | st.sampled_from(["promt", "choosen", "score"]) | ANY_TEXT
ROW = st.dictionaries(KEY, CELL, max_size=5)
TEXTUAL = ("texts", "prompts", "demonstrations", "preferences")


def must_tell(error: BadRecordError, place: str) -> None:
    text = str(error)
    text.encode()  # a log file, summary.json and W&B take UTF-8 only
    assert text.startswith(place)
    assert ". Fix: " in text
    assert "\n" not in text
    assert len(text) < 3000


def is_whole(record: Record) -> bool:
    """Whether the record holds texts that can be written, and nothing else."""
    texts = [getattr(record, key, "") for key in ("text", "prompt", "completion", "chosen")]
    for text in texts:
        text_key(text).encode()
    return kind_of(record) in TEXTUAL


@settings(DRAWN, max_examples=20)
@given(st.lists(ROW, min_size=1, max_size=3))
def test_any_rows_are_records_or_are_named(rows):
    try:
        parsed = source_of(*rows).parsed("train")
    except BadRecordError as error:
        must_tell(error, "set.jsonl")
    else:
        assert len(parsed) == len(rows)
        assert all(map(is_whole, parsed))
    source = source_of(*rows, on_bad_record="skip")
    try:
        kept = source.parsed("train")
    except BadRecordError as error:
        must_tell(error, "set.jsonl: no record is left")
    else:
        assert len(kept) + len(source.skipped_records) == len(rows), "a record is gone"
        for record in kept:
            for kind in TEXTUAL:
                convert(record, kind)


def convert(record: Record, kind: Any) -> None:
    try:
        (found,) = to_kind(record, kind)
        assert kind_of(found) == kind
    except BadRecordError as error:
        must_tell(error, "set.jsonl")
