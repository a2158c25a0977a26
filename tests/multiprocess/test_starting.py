"""Models of a sharded run: rank 0 reads them, one at a time, and all ranks hold what it read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builders.models import MODEL_TYPES
from tests.builders.ranks import rank_reports

pytestmark = pytest.mark.timeout(200)
SCRIPT = str(Path(__file__).with_name("start_stage.py"))
MIB = 2**20
FAMILIES = (*MODEL_TYPES, "llama_tied", "gemma3_text")
ALONE = ("reward", "new_head", "classifier", "from_scratch")


def started(what: str, folder: Path) -> list[dict[str, Any]]:
    return rank_reports([SCRIPT, what, str(folder)], folder, timeout=180)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return started("equal", tmp_path_factory.mktemp("equal"))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [*FAMILIES, *(f"{name}_lora" for name in FAMILIES), *ALONE])
def test_every_tensor_of_a_rank_is_that_of_one_process(kind, reports):
    for report in (rank[kind] for rank in reports):
        assert report["wrong"] == []
        assert report["tensors"] > 20
        assert report["sharded"] > 20


@pytest.mark.thorough
def test_buffers_that_no_state_dict_holds_and_ties_were_among_them(reports):
    for family in ("llama", "gpt_neox", "gemma3_text"):
        assert reports[1][family]["buffers"] >= 6, "three models, each with rotary embeddings"
    for family in ("gpt2", "opt", "llama_tied", "gemma3_text"):
        assert reports[1][family]["tied"] == 2, "policy and reference"


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
def test_ranks_that_do_not_read_never_hold_a_whole_model(tmp_path):
    first, second = started("memory", tmp_path)
    whole = first["whole"]
    assert whole > 100 * MIB
    shards = 3 * whole / 2  # half of policy, value model and reference
    assert shards < second["peak"] < shards + whole / 2
    assert shards + whole / 2 < first["peak"] < shards + 1.5 * whole


def test_a_model_that_rank_0_cannot_read_ends_the_others_with_its_reason(tmp_path):
    first, second = (rank["error"] for rank in started("failure", tmp_path))
    assert first.startswith("ModelError: cannot load")
    assert second == f"RuntimeError: rank 0 could not build the models: {first}"
