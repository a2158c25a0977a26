"""Whatever became of a checkpoint's bytes: it is what was saved, or it is refused by its name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lightning.runs.resume import CheckpointError, check_checkpoint, read_checkpoint
from tests.bad_input.examples import examples
from tests.bad_input.test_any_records import DAMAGE, damaged
from tests.bad_input.test_untrusted_checkpoints import sharded

CONTENT = {
    "state_dict": {"weight": torch.arange(64.0).reshape(8, 8), "bias": torch.ones(8)},
    "optimizer_states": [
        {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
    ],
    "global_step": 3,
}


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


WHOLE = saved(CONTENT)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.equal(other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def must_name(error: CheckpointError, path: Path) -> None:
    assert str(path) in str(error)
    assert "\n" not in str(error)


def check_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        check_checkpoint(path)
    except CheckpointError as error:
        must_name(error, path)
    else:
        assert same(CONTENT, read_checkpoint(path)), "other values were taken for the saved ones"


@examples(20)
@given(DAMAGE)
def test_a_damaged_checkpoint_is_refused_or_is_whole(tmp_path, damage):
    check_bytes(tmp_path / "last.ckpt", damaged(WHOLE, *damage))


@pytest.mark.slow
@examples(5000)
@given(DAMAGE | st.tuples(st.just(0.0), st.binary(max_size=300), st.just("put")))
def test_very_many_damaged_checkpoints_are_refused_or_whole(tmp_path, damage):
    check_bytes(tmp_path / "last.ckpt", damaged(WHOLE, *damage))


def test_every_single_byte_of_a_checkpoint_counts(tmp_path):
    for at in range(0, len(WHOLE), 97):
        content = bytearray(WHOLE)
        content[at] ^= 0x55
        check_bytes(tmp_path / "last.ckpt", bytes(content))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
)


def check_content(path: Path, content: Any) -> None:
    path.write_bytes(saved(content))
    try:
        found = read_checkpoint(path)
    except CheckpointError as error:
        must_name(error, path)
    else:
        assert isinstance(found["state_dict"], dict)


@pytest.mark.thorough
@examples(30)
@given(PLAIN | st.fixed_dictionaries({"state_dict": PLAIN}))
def test_any_plain_content_is_a_checkpoint_or_is_said_to_be_none(tmp_path, content):
    check_content(tmp_path / "last.ckpt", content)


PARTS = ("checksums.json", "meta.pt", "shard-00001.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharded(tmp_path_factory.mktemp("sharded") / "a.ckpt")


def check_folder(folder: Path, part: str, damage: tuple[float, bytes, str]) -> None:
    whole = (folder / part).read_bytes()
    (folder / part).write_bytes(damaged(whole, *damage))
    try:
        check_checkpoint(folder)
    except CheckpointError as error:
        must_name(error, folder)
    finally:
        (folder / part).write_bytes(whole)


@pytest.mark.filterwarnings("ignore::UserWarning")
@examples(15)
@given(st.sampled_from(PARTS), DAMAGE)
def test_damaged_shards_are_refused_or_do_no_harm(folder, part, damage):
    check_folder(folder, part, damage)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@examples(3000)
@given(st.sampled_from(PARTS), DAMAGE)
def test_very_many_damaged_shards_are_refused_or_do_no_harm(folder, part, damage):
    check_folder(folder, part, damage)
