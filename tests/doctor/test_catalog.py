"""The detectors as objects: what docs and thresholds have of them."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.history import SharedThresholds
from rlhf_lightning.doctor.thresholds import DoctorThresholds

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_holds_the_table_that_the_code_gives() -> None:
    spec = importlib.util.spec_from_file_location("build_doctor", DOCS / "build_doctor.py")
    assert spec is not None
    assert spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    rows = list(builder.table())
    assert len(rows) == 2 + len(DETECTORS)
    assert "".join(rows) in builder.page()
    assert (DOCS / "doctor.md").read_text() == builder.page(), "run `python docs/build_doctor.py`"


def test_the_page_names_every_detector_that_acts_beside_its_control() -> None:
    text = (DOCS / "doctor.md").read_text().partition("| alert | control | change |\n")[2]
    lines = text.partition("\n\n")[0].splitlines()
    named = [name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(name for name, spec in DETECTORS.items() if spec.action)


def test_every_threshold_belongs_to_one_detector_or_to_all() -> None:
    shared = [item.name for item in fields(SharedThresholds)]
    own = [key for spec in DETECTORS.values() for key in spec.thresholds]
    assert [item.name for item in fields(DoctorThresholds)] == [*shared, *own]
    assert len(set(own)) == len(own) > len(DETECTORS)
