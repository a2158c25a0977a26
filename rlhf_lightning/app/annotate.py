"""The page where people label pairs: `python -m rlhf_lightning.annotate annotate.file=PAIRS`.

It also takes pairs and labels in and gives them out, in our own records and in formats of others.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from rlhf_lightning.app.command_line import fail, say
from rlhf_lightning.app.config.compose import ConfigError, register
from rlhf_lightning.app.config.errors import explain_invalid
from rlhf_lightning.app.config.groups import Settings, hparams_of
from rlhf_lightning.app.config.validate import load_values
from rlhf_lightning.preferences.annotation.assignment import Sharing
from rlhf_lightning.preferences.annotation.server.settings import PageSettings

if TYPE_CHECKING:
    from rlhf_lightning.preferences.annotation.store import LabelStore

ACTIONS = ("serve", "import", "export", "status")
FORMATS = ("pairs", "labels", "trl", "argilla", "label_studio")


def _hosts_joined(page: Any) -> Any:
    if not isinstance(page, Mapping) or not isinstance(page.get("hosts"), list):
        return page
    return {**page, "hosts": ",".join(map(str, page["hosts"]))}


# With its hosts as one text.
_PAGE: Any = Annotated[hparams_of(PageSettings), BeforeValidator(_hosts_joined)]  # type: ignore[valid-type]


class AnnotateSettings(Settings):
    """The settings of `conf/annotate.yaml`."""

    store: Annotated[Path, Field(strict=False)]
    action: Literal["serve", "import", "export", "status"] = "serve"
    file: Annotated[Path | None, BeforeValidator(lambda file: Path(file) if file else None)]
    format: Literal["auto", "pairs", "labels", "trl", "argilla", "label_studio"] = "auto"
    known: Literal["auto", "labels", "gold", "ignore"] = "auto"
    labels: Literal["aggregated", "raw"] = "aggregated"
    method: Literal["people_first", "majority", "dawid_skene"] = "people_first"
    ratings_per_pair: Annotated[int, Field(ge=1)] = 1
    sharing: hparams_of(Sharing)  # type: ignore[valid-type]
    page: _PAGE = Field(repr=False)  # it knows the token

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        if self.action in ("import", "export") and self.file is None:
            raise ValueError(f".file is not set: {self.action} needs a file")
        if self.action == "export" and self.format == "auto":
            raise ValueError(
                f".format=auto tells what is read: export needs one of {', '.join(FORMATS)}"
            )
        if self.action == "export" and (self.format, self.labels) == ("labels", "aggregated"):
            raise ValueError(
                ".format=labels holds labels of single annotators: add annotate.labels=raw"
            )
        return self

    @property
    def known_of_file(self) -> Literal["labels", "gold", "ignore"]:
        """The use of preferences in the file: pairs that are served are to be labelled."""
        if self.known != "auto":
            return self.known
        return "ignore" if self.action == "serve" else "labels"


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


def run(settings: AnnotateSettings) -> None:
    """Serve, import, export or tell how things stand, and print what was done.

    Args:
        settings: checked.

    Raises:
        ConfigError: if the files do not allow it.
    """
    from rlhf_lightning.data.errors import BadRecordError
    from rlhf_lightning.preferences.annotation.database import StoreError
    from rlhf_lightning.preferences.annotation.store import LabelStore

    if not settings.store.exists() and (settings.file is None or settings.action == "export"):
        raise ConfigError(
            f"annotate.store={settings.store} does not exist: add annotate.file=PAIRS to take "
            "pairs in, e.g. JSON lines with prompt, chosen and rejected"
        )
    try:
        with LabelStore(settings.store) as store:
            if settings.action == "export":
                _export(settings, store)
            elif settings.action == "status":
                from rlhf_lightning.preferences.annotation.store import describe_store

                say(describe_store(store))
            else:
                if settings.file is not None:
                    _import(settings, store)
                if settings.action == "serve":
                    _serve(settings, store)
    except (BadRecordError, StoreError) as error:
        raise ConfigError(str(error)) from error


def _import(settings: AnnotateSettings, store: LabelStore) -> None:
    from rlhf_lightning.preferences.annotation.assignment import iso_time
    from rlhf_lightning.preferences.formats.io import read_collection

    assert settings.file is not None
    now = iso_time(settings.file.stat().st_mtime) if settings.file.exists() else ""
    found = read_collection(
        settings.file, format=settings.format, known=settings.known_of_file, now=now
    )
    pairs = store.add_pairs(found.pairs, ratings_per_pair=settings.ratings_per_pair)
    labels = store.add_labels(found.labels)
    gold = sum(pair.gold is not None for pair in found.pairs)
    again = len(found.labels) - labels
    say(
        f"{settings.file}: {pairs} new pairs of {len(found.pairs)} ({gold} with a known answer), "
        f"{labels} new labels of {len(found.labels)}"
        + (f"; of {again} the annotator has one on that pair already, which stays" if again else "")
    )
    if found.dropped:
        say(
            f"{found.dropped} preferences in {settings.file} are left out, and the pairs are "
            "labelled anew: annotate.known=labels keeps them as labels, annotate.known=gold makes "
            "them known answers"
            if settings.known_of_file == "ignore"
            else f"{found.dropped} preferences in {settings.file} are left out: a known answer is "
            "one on which all labels of its pair agree"
        )


def _export(settings: AnnotateSettings, store: LabelStore) -> None:
    from rlhf_lightning.preferences.formats.io import Collection, write_collection

    assert settings.file is not None
    assert settings.format != "auto"
    found = Collection(tuple(store.pairs()), tuple(store.labels()))
    written = write_collection(
        settings.file, found, format=settings.format, level=settings.labels, method=settings.method
    )
    left_out = ", ".join(f"{number} {what}" for what, number in written.left_out.most_common())
    say(f"{settings.file}: {written.rows} rows" + (f" (left out: {left_out})" if left_out else ""))


def _serve(settings: AnnotateSettings, store: LabelStore) -> None:
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
        serve(store, settings.page, settings.sharing, announce=announce)
    except PortError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        after = store.progress()
        say(f"stopped: {after.done} of {after.wanted} labels are in {store.path}")


def compose_settings(overrides: Sequence[str]) -> AnnotateSettings:
    """Return the settings that the command line asks for.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    values = load_values("annotate", list(overrides))
    try:
        return AnnotateSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain_invalid(error, AnnotateSettings, "annotate")) from error


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(HELP)
        return
    register()
    try:
        run(compose_settings(arguments))
    except ConfigError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
