"""The page where people label pairs: `python -m rlhf_lightning.annotate file=PAIRS`.

It also takes pairs and labels in and gives them out, in our own records and in formats of others.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from rlhf_lightning.app.command_line import run_command, say
from rlhf_lightning.app.config.commands import AnnotateSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.failures import refusing
from rlhf_lightning.preferences.annotation.store import (
    LabelStore,
    StoreError,
    describe_store,
    iso_time,
)
from rlhf_lightning.runs.stopping import RunStoppedError


def run(settings: AnnotateSettings) -> None:
    """Serve, import, export or show the state of the store, and print the result.

    Raises:
        ConfigError: if the files do not allow it.
    """
    with refusing(StoreError), LabelStore(settings.store) as store:
        if settings.action == "export":
            _export(settings, store)
        if settings.action == "status":
            say(describe_store(store))
        if settings.action == "serve":
            _keep_question(settings, store)
        if settings.action in ("serve", "import") and settings.file is not None:
            _import(settings, store)
        if settings.action == "serve":
            _serve(settings, store)


def _keep_question(settings: AnnotateSettings, store: LabelStore) -> None:
    question = f"{settings.page.title} {settings.page.instructions}".strip()
    asked = next(iter(store.noted("question")), question)
    if asked != question and next(store.labels(at_page=True), None) and not settings.add:
        raise ConfigError(
            f"page.title and page.instructions ask {question!r}, labels in store={store.path} "
            f"answer {asked!r}: ask that, name another store, or set add=true"
        )
    store.note("question", question)


def _import(settings: AnnotateSettings, store: LabelStore) -> None:
    # brings transformers: the page and its status start without it
    from rlhf_lightning.preferences.exchange import read_collection

    assert settings.file is not None
    found = read_collection(
        settings.file,
        format=settings.format,
        known="ignore" if settings.action == "serve" else "labels",  # to be labelled again
        now=iso_time(settings.file.stat().st_mtime),
    )
    held = {pair.pair_id for pair in store.pairs()}
    is_other = bool(held and found.pairs) and held.isdisjoint(x.pair_id for x in found.pairs)
    if is_other and not settings.add:
        files = ", ".join(store.noted("import %")) or "another file"
        raise ConfigError(
            f"file={settings.file} shares no pair with store={settings.store}, which holds "
            f"{len(held)} pairs of {files}: give another store, or add=true to label both in one"
        )
    pairs = store.add_pairs(found.pairs, labels_per_pair=settings.labels_per_pair)
    if found.pairs:
        store.note(f"import {settings.file.resolve()}", str(settings.file))
    labels = store.add_labels(found.labels)
    say(
        f"{settings.file}: {pairs} new pairs of {len(found.pairs)}, {labels} new labels of "
        f"{len(found.labels)}"
    )
    if found.dropped:
        say(
            f"{found.dropped} preferences in {settings.file} are left out: action=import keeps "
            "them as labels"
        )


def _export(settings: AnnotateSettings, store: LabelStore) -> None:
    # brings transformers: the page and its status start without it
    from rlhf_lightning.preferences.exchange import Collection, write_collection

    assert settings.file is not None
    assert settings.format != "auto"
    if os.path.lexists(settings.file) and _digest(settings.file) not in store.noted("export %"):
        told = f"file={settings.file} is there already, and no export of this store"
        raise ConfigError(f"{told}: give another name")
    found = Collection(tuple(store.pairs()), tuple(store.labels()))
    rows, dropped = write_collection(settings.file, found, format=settings.format)
    store.note(f"export {settings.file.resolve()}", _digest(settings.file))
    left_out = ", ".join(f"{number} {what}" for what, number in dropped.most_common())
    say(f"{settings.file}: {rows} rows" + (f" (left out: {left_out})" if left_out else ""))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes() if file.is_file() else b"").hexdigest()


def _serve(settings: AnnotateSettings, store: LabelStore) -> None:
    try:
        # of the extra `annotate`, which may be missing
        from rlhf_lightning.preferences.annotation.page import serve
    except ModuleNotFoundError as error:
        told = f"the page needs {error.name}: pip install -e '.[annotate]' in the checkout"
        raise ConfigError(told) from error
    progress = store.progress()
    if not progress.wanted and next(store.pairs(), None) is None:
        raise ConfigError(f"store={store.path} holds no pairs: add file=PAIRS")
    counts = f"{progress.done} of {progress.wanted} labels are there, in {store.path}. "

    def announce(address: str) -> None:
        say(f"{address}\n{counts}Control-C stops; nothing is lost.")

    try:
        serve(store, announce=announce, **settings.page.model_dump())
    except OSError as error:
        told = f"page.port={settings.page.port} cannot be listened on ({error.strerror})"
        raise ConfigError(f"{told}: page.port=0 takes a free port") from error
    except (KeyboardInterrupt, RunStoppedError):
        after = store.progress()
        say(f"stopped: {after.done} of {after.wanted} labels are in {store.path}")


def main() -> None:
    """Run the command line."""
    run_command("annotate", run)
