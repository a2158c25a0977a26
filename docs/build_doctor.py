"""Write the table of detectors into docs/doctor.md, from the specs in the code.

python docs/build_doctor.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.spec import DetectorSpec
from rlhf_lightning.doctor.thresholds import DoctorThresholds

PAGE = Path(__file__).with_name("doctor.md")
BEGIN, END = "<!-- made by docs/build_doctor.py -->\n", "<!-- end -->\n"


def row(spec: DetectorSpec) -> str:
    """Return the line of one detector."""
    limits = DoctorThresholds()
    bounds = [key for key in spec.bound_keys if key]
    shown = {key: f"`{key}` {getattr(limits, key):g}" for key in spec.thresholds}
    other = spec.without_model
    beyond = f"{spec.beyond} " + ", ".join(shown.pop(key) for key in bounds)
    cells = (
        f"`{spec.name}`: {spec.title[:1].lower()}{spec.title[1:]}",
        f"{spec.measures}, {spec.unit}",
        "; ".join((beyond, *shown.values())) + ("; serious" if spec.serious else ""),
        spec.cause + (f"; without a reward model: {other[0]}" if other else ""),
        spec.remedy
        + (f"; without a reward model: {other[1]}" if other else "")
        + (f"; `doctor=act` {spec.action.words}" if spec.action else ""),
    )
    return f"| {' | '.join(cells)} |\n"


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| detector | what is read, in which unit | warn, alarm | usual cause | what helps |\n"
    yield "|---|---|---|---|---|\n"
    yield from (row(spec) for spec in DETECTORS.values())


def page() -> str:
    """Return docs/doctor.md with the table that the code gives."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "".join(table()) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
