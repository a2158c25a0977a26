"""The page where people label pairs: `python -m rlhf_lightning.annotate annotate.file=PAIRS`.

It also takes pairs and labels in and gives them out, in our own records and in formats of others.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.command_line import fail, say
from rlhf_lightning.app.config.compose import ConfigError, conf_dir, register
from rlhf_lightning.app.config.errors import COMPOSE_ERRORS, explain

if TYPE_CHECKING:
    from rlhf_lightning.preferences.annotation.store import LabelStore

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from rlhf_lightning.app.config.schema import build_checked
from rlhf_lightning.app.config.targets import did_you_mean
from rlhf_lightning.hparams import Checked, number
from rlhf_lightning.preferences.annotation.assignment import Sharing
from rlhf_lightning.preferences.annotation.server.settings import PageSettings

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


HELP = f"""\
The page where people label pairs of answers, one pair at a time.

  python -m rlhf_lightning.annotate annotate.file=pairs.jsonl     take these pairs in, and serve
  python -m rlhf_lightning.annotate                               serve what is there
  python -m rlhf_lightning.annotate annotate.action=status        who has labelled how much
  python -m rlhf_lightning.annotate annotate.action=import annotate.file=project.json
  python -m rlhf_lightning.annotate annotate.action=export annotate.file=out.jsonl \\
    annotate.format=trl                                           chosen and rejected, for training

  annotate.action=       {", ".join(ACTIONS)}
  annotate.format=       of the file: auto, {", ".join(FORMATS)}
  annotate.store=FILE    where everything is kept (outputs/annotate/labels.sqlite)
  annotate.ratings_per_pair=2        different people who rate each pair that is taken in
  annotate.sharing.gold_share=0.1    share of questions whose answer is known
  annotate.labels=raw                export every label instead of one verdict a pair
  annotate.known=labels              keep the preferences of the file as labels; serving leaves
                                     them out unless told, importing keeps them. gold: use them
                                     as known answers
  annotate.page.port=8000            annotate.page.host, hosts, title, instructions

Only this machine is let in. With RLHF_ANNOTATE_TOKEN set, annotate.page.host=ADDRESS lets others
in who give that token. conf/annotate.yaml has every setting.
"""


def run(request: Request) -> None:
    """Serve, import, export or tell how things stand, and print what was done.

    Args:
        request: what is asked for, checked.

    Raises:
        ConfigError: if the files do not allow it.
    """
    from rlhf_lightning.data.errors import BadRecordError
    from rlhf_lightning.preferences.annotation.database import StoreError
    from rlhf_lightning.preferences.annotation.store import LabelStore

    if not request.store.exists() and (request.file is None or request.action == "export"):
        raise ConfigError(
            f"annotate.store={request.store} does not exist: add annotate.file=PAIRS to take pairs "
            "in, e.g. JSON lines with prompt, chosen and rejected"
        )
    try:
        with LabelStore(request.store) as store:
            if request.action == "export":
                _export(request, store)
            elif request.action == "status":
                from rlhf_lightning.preferences.annotation.store import describe_store

                say(describe_store(store))
            else:
                if request.file is not None:
                    _import(request, store)
                if request.action == "serve":
                    _serve(request, store)
    except (BadRecordError, StoreError) as error:
        raise ConfigError(str(error)) from error


def _import(request: Request, store: LabelStore) -> None:
    from rlhf_lightning.preferences.annotation.assignment import iso_time
    from rlhf_lightning.preferences.formats.io import read_collection

    assert request.file is not None
    now = iso_time(request.file.stat().st_mtime) if request.file.exists() else ""
    found = read_collection(request.file, format=request.format, known=request.known, now=now)
    pairs = store.add_pairs(found.pairs, ratings_per_pair=request.ratings_per_pair)
    labels = store.add_labels(found.labels)
    gold = sum(pair.gold is not None for pair in found.pairs)
    again = len(found.labels) - labels
    say(
        f"{request.file}: {pairs} new pairs of {len(found.pairs)} ({gold} with a known answer), "
        f"{labels} new labels of {len(found.labels)}"
        + (f"; of {again} the annotator has one on that pair already, which stays" if again else "")
    )
    if found.dropped:
        say(
            f"{found.dropped} preferences in {request.file} are left out, and the pairs are "
            "labelled anew: annotate.known=labels keeps them as labels, annotate.known=gold makes "
            "them known answers"
            if request.known == "ignore"
            else f"{found.dropped} preferences in {request.file} are left out: a known answer is "
            "one on which all labels of its pair agree"
        )


def _export(request: Request, store: LabelStore) -> None:
    from rlhf_lightning.preferences.formats.io import Collection, write_collection

    assert request.file is not None
    assert request.format != "auto"
    found = Collection(tuple(store.pairs()), tuple(store.labels()))
    written = write_collection(
        request.file, found, format=request.format, level=request.labels, method=request.method
    )
    left_out = ", ".join(f"{number} {what}" for what, number in written.left_out.most_common())
    say(f"{request.file}: {written.rows} rows" + (f" (left out: {left_out})" if left_out else ""))


def _serve(request: Request, store: LabelStore) -> None:
    try:
        from rlhf_lightning.preferences.annotation.server.serve import PortError, serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the page needs {error.name}: pip install -e '.[annotate]' in the checkout"
        ) from error
    progress = store.progress()
    if not progress.wanted and next(store.pairs(), None) is None:
        raise ConfigError(f"annotate.store={store.path} holds no pairs: add annotate.file=PAIRS")

    def announce(address: str) -> None:
        say(address)
        say(
            f"{progress.done} of {progress.wanted} labels are there, in {store.path}. "
            "Control-C stops; nothing is lost."
        )
        if progress.wanted and progress.done >= progress.wanted:
            say(
                "Nothing is left to label: every pair has its ratings. Another annotate.store and "
                "annotate.file=PAIRS begin anew; annotate.action=export writes the labels"
            )

    # A service that is told to stop ends as after Control-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve(store, request.page, request.sharing, announce=announce)
    except PortError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        after = store.progress()
        say(f"stopped: {after.done} of {after.wanted} labels are in {store.path}")


def compose_request(overrides: Sequence[str]) -> Request:
    """Return what the command line asks for.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        try:
            cfg = compose("annotate", overrides=list(overrides))
            values = _plain(cfg)
        except COMPOSE_ERRORS as error:
            raise ConfigError(explain(error, list(overrides), "annotate")) from error
    try:
        return read_request(values)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _plain(cfg: DictConfig) -> dict[str, object]:
    values = OmegaConf.to_container(cfg.annotate, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(HELP)
        return
    register()
    try:
        run(compose_request(arguments))
    except (ConfigError, HydraException) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
