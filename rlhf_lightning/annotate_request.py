"""What `rlhf_lightning.annotate` was asked for: settings with their types, ranges and choices.

Light on purpose: no torch, so that a mistake is answered at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from rlhf_lightning.hparams import Checked, number
from rlhf_lightning.preferences.page.settings import PageSettings
from rlhf_lightning.preferences.sharing import Sharing
from rlhf_lightning.settings import build_checked
from rlhf_lightning.targets import did_you_mean

Action = Literal["serve", "import", "export", "status"]
Format = Literal["auto", "pairs", "labels", "trl", "argilla", "label_studio"]
ACTIONS = ("serve", "import", "export", "status")
FORMATS = ("pairs", "labels", "trl", "argilla", "label_studio")
CHOICES = {
    "action": ACTIONS,
    "format": ("auto", *FORMATS),
    "known": ("auto", "labels", "gold", "ignore"),
    "labels": ("aggregated", "raw"),
    "method": ("people_first", "majority", "dawid_skene"),
}


@dataclass(frozen=True)
class AnnotateSettings(Checked):
    """The keys right below `annotate`."""

    store: str
    action: str = "serve"
    file: str | None = None
    format: str = "auto"
    known: str = "auto"
    labels: str = "aggregated"
    method: str = "people_first"
    ratings_per_pair: int = number(1, at_least=1)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        for key, known in CHOICES.items():
            value = getattr(self, key)
            if value not in known:
                raise ValueError(
                    f"{type(self).__name__}.{key}={value} must be one of {', '.join(known)}"
                    f"{did_you_mean(value, list(known))}"
                )
        if self.action in ("import", "export") and not self.file:
            raise ValueError(f"{type(self).__name__}.file is not set: {self.action} needs a file")
        if self.action == "export" and self.format == "auto":
            raise ValueError(
                f"{type(self).__name__}.format=auto tells what is read: export needs one of "
                f"{', '.join(FORMATS)}"
            )
        if self.action == "export" and (self.format, self.labels) == ("labels", "aggregated"):
            raise ValueError(
                f"{type(self).__name__}.format=labels holds labels of single annotators: add "
                "annotate.labels=raw"
            )

    @property
    def known_of_file(self) -> Literal["labels", "gold", "ignore"]:
        """What becomes of preferences in the file: who serves pairs wants them labelled."""
        auto = "ignore" if self.action == "serve" else "labels"
        return cast(
            Literal["labels", "gold", "ignore"], auto if self.known == "auto" else self.known
        )


@dataclass(frozen=True)
class Request:
    """What is to be done, checked; the fields are those of `conf/annotate.yaml`."""

    action: Action
    store: Path
    file: Path | None
    format: Format
    known: Literal["labels", "gold", "ignore"]
    labels: Literal["aggregated", "raw"]
    method: Literal["people_first", "majority", "dawid_skene"]
    ratings_per_pair: int
    sharing: Sharing
    page: PageSettings = field(repr=False)  # it knows the token


def read_request(values: Mapping[str, Any]) -> Request:
    """Return the request of the group `annotate`.

    Args:
        values: plain dicts and lists.

    Raises:
        ValueError: with the key, what it got and what it wants.
    """
    own = {key: value for key, value in values.items() if key not in ("sharing", "page")}
    settings = cast(AnnotateSettings, build_checked(AnnotateSettings, own, "annotate"))
    sharing = build_checked(Sharing, _group(values, "sharing"), "annotate.sharing")
    page = dict(_group(values, "page"))
    hosts = page.get("hosts") or []
    if isinstance(hosts, list) and all(isinstance(host, str) for host in hosts):
        page["hosts"] = ",".join(hosts)
    return Request(
        action=cast(Action, settings.action),
        store=Path(settings.store),
        file=Path(settings.file) if settings.file else None,
        format=cast(Format, settings.format),
        known=settings.known_of_file,
        labels=cast(Literal["aggregated", "raw"], settings.labels),
        method=cast(Literal["people_first", "majority", "dawid_skene"], settings.method),
        ratings_per_pair=settings.ratings_per_pair,
        sharing=cast(Sharing, sharing),
        page=cast(PageSettings, build_checked(PageSettings, page, "annotate.page")),
    )


def _group(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = values.get(name)
    if not isinstance(group, Mapping):
        raise ValueError(f"annotate.{name}={group!r} must be a group of settings: leave it out")
    return group
