"""The results of a study, and the tables of its page."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Values = Mapping[str, float | None]
BEST_OF = re.compile(r" ?n=\d+$")  # of a setting: the best of how many


@dataclass(frozen=True)
class Result:
    """One run of the matrix, as it ended.

    Args:
        row, setting, seed: its place in the matrix.
        status: of its summary, or "not run".
        cause: why it has not completed.
        data_set: whose held-out prompts it was asked; seeds may have their own.
        answers: sampled by training, an iteration.
        metrics: final values, none unless it completed.
        rows: of metrics.csv, likewise.
        seconds, cpu_seconds: wall clock, and user and system time of its processes.
        peak_mib: largest resident memory of one of its processes, MiB.
        times_are_whole: False where an attempt was not seen to end: they are lower bounds then.
        kl_is_bound: True of the best of n, whose KL is its upper bound.
        about: of its summary: from what, on what and against what.
    """

    row: str
    setting: str
    seed: int
    status: str
    cause: str | None
    data_set: str
    answers: int
    metrics: Values
    rows: Sequence[Mapping[str, float]]
    seconds: float
    cpu_seconds: float
    peak_mib: float
    times_are_whole: bool
    kl_is_bound: bool = False
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Such as `ppo kl_coef=0.02 seed 1`."""
        return " ".join(filter(None, (self.row, self.setting, f"seed {self.seed}")))

    @property
    def run(self) -> tuple[str, str, int]:
        """Row, setting and seed of its run: a best-of-n evaluation has a result for each n."""
        return self.row, BEST_OF.sub("", self.setting), self.seed

    @property
    def completed(self) -> bool:
        """True if it counts."""
        return self.status == "completed"


@dataclass(frozen=True)
class RewardModel:
    """The reward model that a row follows.

    Args:
        parameters: without embeddings and head.
        pairs: that it was trained on.
        group: of rows that follow reward models of several sizes in one way.
    """

    parameters: int
    pairs: int
    group: str


@dataclass(frozen=True)
class Study:
    """The results of a matrix.

    Args:
        name, about: of the study.
        results: of all runs.
        measure: metrics that are columns.
        at_kl: where objectives are compared.
        published: metric -> what others report, by row.
        source: of what is published.
        protocol: of the source, line by line, and to each line what is done here.
        expected: time and memory that were expected.
        reward_models: that rows follow, by row.
        starts: rows that others than evaluations start from; they are compared with none.
    """

    name: str
    about: str
    results: Sequence[Result]
    measure: Sequence[str]
    at_kl: Sequence[float]
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    source: str = ""
    protocol: Mapping[str, str] = field(default_factory=dict)
    expected: str = ""
    reward_models: Mapping[str, RewardModel] = field(default_factory=dict)
    starts: frozenset[str] = frozenset()

    @property
    def same_prompts(self) -> bool:
        """True if seeds are asked the same prompts; a built-in world has its own."""
        rows = by(self.results, lambda r: r.row).values()
        return any(len({r.data_set for r in row}) < len({r.seed for r in row}) for row in rows)

    @property
    def bounded(self) -> list[str]:
        """Rows whose KL is an upper bound."""
        return list(by([r for r in self.results if r.kl_is_bound], lambda r: r.row))


@dataclass(frozen=True)
class Table:
    """A table of the page: its cells are text."""

    title: str
    lead: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return it for docs."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        cells = ("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)
        return "\n".join([f"## {self.title}", "", self.lead, "", *cells, ""])


def by(results: Sequence[Result], key: Callable[[Result], str]) -> dict[str, list[Result]]:
    """Return the results in groups, in their order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(key(result), []).append(result)
    return found
