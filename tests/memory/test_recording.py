"""Recordings of a few layers stand for deep models, and the C library's share is its own."""

from __future__ import annotations

import array
import subprocess
import sys

import pytest

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.memory import heap, skeletons
from rlhf_lightning.memory.heap_replay import FIRST_FREED, PHASE, TRIM
from rlhf_lightning.memory.recording import END, FIRST, LATER, RELEASE, record_update
from rlhf_lightning.memory.shapes import Shape
from rlhf_lightning.memory.skeletons import Style
from rlhf_lightning.memory.traces import Rows
from rlhf_lightning.memory.tracker import NODE

MIB = 2**20
FIELDS = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "tie_word_embeddings": True,
}
DEPTH = 8

needs_glibc = pytest.mark.skipif(not heap.replayable(), reason="needs glibc's malloc")


def recorded(layers: int, lora: LoraHparams | None):
    style = Style("bf16-mixed", lora=lora)
    model = skeletons.policy(Shape(FIELDS), layers, style)
    skeletons.made_fake(model.root, None)
    return record_update(
        model,
        Rows(4, 16, 8),
        style,
        layers=layers,
        depth=DEPTH,
        accumulated=True,
        with_entropy=False,
    )


def sizes(recording, block: str) -> list[int]:
    """Return sizes in the order of allocation, and as negative numbers what is freed."""
    found, known = [], {}
    for earlier in (FIRST, LATER, END, RELEASE):
        out = []
        for entry in recording.entries(earlier):
            if isinstance(entry, list):
                out += [-known.pop(key) for key in entry]
            elif entry[0] != NODE:
                known[entry[1]] = entry[0]
                out.append(entry[0])
        if earlier == block:
            found = out
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lora", [None, LoraHparams(base_precision="bf16-mixed")])
def test_a_deep_model_is_recorded_as_few_layers_are_with_the_middle_repeated(lora):
    expanded, direct = recorded(5, lora), recorded(DEPTH, lora)
    for block in (FIRST, LATER, END, RELEASE):
        # What is freed at once has no order of its own.
        assert sorted(sizes(expanded, block)) == sorted(sizes(direct, block))
    allocated = [[s for s in sizes(r, FIRST) if s >= 0] for r in (expanded, direct)]
    assert allocated[0] == allocated[1]


def replayed(events: list[int]) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_lightning.memory.heap_replay"],
        input=array.array("q", events).tobytes(),
        capture_output=True,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


@needs_glibc
def test_a_replay_counts_what_is_freed_and_cannot_be_used_again():
    events, kept = [], []
    for index in range(40):  # a tensor that goes and one that stays, of the same size
        events += [2 * MIB, 2 * MIB, FIRST_FREED - 2 * index]
        kept.append(2 * index + 1)
    events += [PHASE, *(FIRST_FREED - place for place in kept), TRIM, PHASE, PHASE]
    first, _, last = replayed(events)
    assert 40 * MIB < first <= 80.5 * MIB
    assert last < MIB


@needs_glibc
def test_a_replay_holds_little_where_tensors_come_one_after_the_other():
    events = []
    for index in range(40):
        events += [2 * MIB, FIRST_FREED - index]
    (peak,) = replayed([*events, PHASE])
    assert MIB <= peak < 12 * MIB  # some fit into what the interpreter left free, elsewhere


@needs_glibc
def test_the_c_library_holds_at_least_the_tensors_that_are_alive():
    held = heap.resident_in_update(
        {"policy": recorded(5, None)}, {}, micro_batches=2, minibatches=1, trims=False
    )
    model = skeletons.policy(Shape(FIELDS), DEPTH, Style("32-true"))
    gradients = 4 * sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert held > gradients
