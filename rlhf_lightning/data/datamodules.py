"""LightningDataModules of the three stages: SFT, reward model, PPO.

Each takes the arguments of `RecordDataModule` that make sense for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import Length, PathOrName, Size, checked
from rlhf_lightning.data.collate import PreferenceCollator, PromptCollator, SFTCollator
from rlhf_lightning.data.encode import EncodedPreference, EncodedSequence
from rlhf_lightning.data.files import read_rows
from rlhf_lightning.data.record_datamodule import RecordDataModule, RowOptions, StreamOptions
from rlhf_lightning.data.sampler import stream_generator
from rlhf_lightning.data.sources.base import (
    RELIABILITY,
    JoinedSource,
    PreferenceFolder,
    RecordSource,
    RowSource,
)
from rlhf_lightning.data.sources.given import Rows, as_source, nested_sources


class DemonstrationDataModule(RecordDataModule):
    """Batches of `SFTBatch`: demonstrations, or unlabelled texts for a base model.

    The arguments are those of `RecordDataModule`; `kind` is `demonstrations` or `texts`.
    """

    kinds = ("demonstrations", "texts")
    _batch = SFTCollator


class PreferenceDataModule(RecordDataModule):
    """Batches of `PreferenceBatch`; a row is as long as its longer side.

    The arguments are those of `RecordDataModule`. `path` names a file or folder of preference
    records, such as `rlhf_lightning.collect` makes, that takes the place of the source; the records
    of the folders and files `also` are added, as later rounds add theirs. They are read as those of
    the source are: with `columns` and `label_good` if they have the columns that these name, and
    always with `rendered`, `on_bad_record` and `system_into_user`. `path` is split as it is, too.
    The sources of a mix must agree in these.

    With `group_by_prompt` pairs of a prompt come one after the other, so that a batch of many has
    few responses. A `RewardModule` without `micro_batch_size` reads each of them once (with one,
    once in each micro-batch): where all responses to a prompt were compared with each other this
    saves nearly all of the work. DPO gains nothing. It takes the place of `group_by_length`.

    With `balance_length` training pairs whose preferred response is the shorter one (or the longer
    one, if these are fewer) are repeated until both are equally many: length alone then predicts
    nothing.

    With `kind="unpaired"` a row is one response with a label, for `DPOHparams(kind="kto")`; a pair
    gives two. A response to another prompt comes with it, to estimate the KL.
    """

    kinds = ("preferences", "unpaired")
    _batch = PreferenceCollator

    @checked(but=("source",))
    def __init__(
        self,
        source: RecordSource | Rows | str | Path,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        batch_size: Size,
        path: PathOrName | None = None,
        also: Sequence[PathOrName] = (),
        group_by_prompt: bool = False,
        balance_length: bool = False,
        **options: Unpack[RowOptions],
    ) -> None:
        """Check the numbers; nothing is read yet."""
        options["group_by_length"] = options["group_by_length"] and not group_by_prompt
        first = as_source(source) if path is None else _pairs_in(path, source)
        more = [_pairs_in(one, source, validation_fraction=0.0) for one in also]
        pairs = JoinedSource([first, *more]) if more else first
        super().__init__(pairs, tokenizer, batch_size=batch_size, **options)
        if self.kind == "unpaired" and (group_by_prompt or balance_length):
            given = f"{group_by_prompt=} and {balance_length=}"
            raise ValueError(f"{given}: both are of pairs alone, use false with kind=unpaired")
        self.group_by_prompt = group_by_prompt
        self.balance_length = balance_length

    def setup(self, stage: str | None = None) -> None:
        """Encode both splits, once, and number the rows of each."""
        if self._rows:
            return
        super().setup(stage)
        if self.balance_length:
            balanced = balanced_by_length(self._rows["train"], self.seed)
            repeats = len(balanced) - len(self._rows["train"])
            rank_zero_info(f"balance_length: {repeats:,} repeats, {len(balanced):,} pairs in all")
            self._rows["train"] = balanced
        if self.kind == "unpaired":
            others = self._rows["train"]
            self._rows = {
                split: with_other_responses(rows, others, max_length=self.max_length)
                for split, rows in self._rows.items()
            }
        for rows in self._rows.values():
            rows[:] = [replace(row, row_id=number) for number, row in enumerate(rows)]

    def _identity(self, num_rows: int) -> dict[str, Any]:
        order = {"group_by_prompt": self.group_by_prompt, "balance_length": self.balance_length}
        return {**order, **super()._identity(num_rows)}

    def _groups(self, rows: Sequence[EncodedPreference]) -> list[int] | None:
        if not self.group_by_prompt:
            return None
        prompts = [row.chosen_input_ids[: row.prompt_length].tobytes() for row in rows]
        number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        return [number[prompt] for prompt in prompts]


def _pairs_in(path: PathOrName, source: Any, **changed: Any) -> PreferenceFolder:
    """Return the records of a path, read as the source's rows are.

    `columns` and `label_good` are those of the source where the path has the columns that they
    name; else it has our names, as what `rlhf_lightning.collect` wrote.

    Raises:
        ValueError: if the sources of a mix are read in several ways.
    """
    folder = PreferenceFolder(path, **changed)
    is_collected = (folder.folder_or_file / RELIABILITY).is_file()
    rows = [one for one in nested_sources(source) if isinstance(one, RowSource)]
    ways = [{x.name: getattr(one, x.name) for x in fields(RowSource)} for one in rows]
    if not ways or (is_collected and any(way != ways[0] for way in ways)):
        return folder
    how = ways[0] | changed
    if keys := [key for key in how if any(way[key] != ways[0][key] for way in ways)]:
        found = f"data.path or data.also {path}: the sources of the mix differ in {', '.join(keys)}"
        raise ValueError(f"{found}: give them the same, or make the file a source of the mix")
    columns = how["columns"] or {}
    if columns or how["label_good"] is not None:
        named = {theirs for theirs in columns.values() if theirs is not None}
        located = chain.from_iterable(map(read_rows, folder.files("train")))
        known = {key for _, row in located if isinstance(row, Mapping) for key in row}
        if is_collected or (named and named.isdisjoint(known)):
            how["columns"] = columns = {}
        if columns.get("label", "label") not in known:
            how["label_good"] = None
    return PreferenceFolder(path, **how)


def balanced_by_length(rows: Sequence[EncodedPreference], seed: int) -> list[EncodedPreference]:
    """Return the pairs, with repeats that make as many prefer the shorter as the longer response.

    Every pair of the rarer kind is repeated equally often, and a random part of them once more.
    Pairs of equal lengths are not repeated. Where one kind is missing there is nothing to repeat.
    """
    longer = [len(row.chosen_input_ids) - len(row.rejected_input_ids) for row in rows]
    kinds = [[r for r, n in zip(rows, longer, strict=True) if n * sign > 0] for sign in (1, -1)]
    rare, common = sorted(kinds, key=len)
    if not rare:
        return list(rows)
    repeats, rest = divmod(len(common) - len(rare), len(rare))
    generator = stream_generator(seed, "balance by length", 0)
    drawn = torch.randperm(len(rare), generator=generator)[:rest].tolist()
    return [*rows, *rare * repeats, *(rare[i] for i in sorted(drawn))]


def with_other_responses(
    rows: Sequence[EncodedSequence], others: Sequence[EncodedSequence], *, max_length: int
) -> list[EncodedPreference]:
    """Return unpaired rows, each with its prompt and a response to another prompt.

    It is the response of the row before among `others`, without those of the same prompt; before
    the first row comes the last one. It only estimates a KL, and is cut where it does not fit.

    Args:
        rows: rows of one split, with labels.
        others: rows of the training split.
        max_length: most tokens of prompt and other response.

    Raises:
        ValueError: if all `others` have the prompt of a row.
    """
    parts = [np.split(row.input_ids, [int(np.argmax(row.loss_mask))]) for row in others]
    prompts = [prompt.tobytes() for prompt, _ in parts]
    paired = []
    for number, row in enumerate(rows):
        length = int(np.argmax(row.loss_mask))
        own = (prompt := row.input_ids[:length]).tobytes()
        before = ((number - back) % len(others) for back in range(1, len(others) + 1))
        other = next((n for n in before if prompts[n] != own), None)
        if other is None:
            raise ValueError("all unpaired rows have one prompt: KTO needs rows of other prompts")
        joined = np.concatenate([prompt, parts[other][1]])[:max_length]
        paired.append(
            EncodedPreference(row.input_ids, joined, length, domain=row.domain, label=row.label)
        )
    return paired


class PromptDataModule(RecordDataModule):
    """Batches of `PromptBatch`, one an iteration of PPO, in the order of the stream.

    A prompt's number is `iteration * batch_size + position in the global batch`, and its rows are
    numbered on from `number * num_generations`, so that sampling noise does not depend on ranks.
    Held-out prompts keep the order of the source (a part of them if `max_validation_rows` is
    given), get one response and are numbered from 0, the same in every validation. The prompts of
    the following iterations come behind those of an iteration, as spares: as many as
    `max_resampling_rounds` or `rollout_lag` of the module need.

    Args:
        source: where the prompts come from; any record with a prompt will do.
        tokenizer: makes ids of them.
        batch_size: prompts of an iteration, over all ranks.
        max_prompt_length: most tokens of a prompt; None for 512, or less where the context of the
            model that is trained has no room for them and a response.
        num_generations: responses to each prompt of an iteration, which then has
            `batch_size * num_generations` rows; those of a prompt stay on one rank.
    """

    kinds = ("prompts",)
    _usual_length = 512
    _leaves_room = True
    _with_row_ids = True

    @checked(but=("source",))
    def __init__(
        self,
        source: RecordSource | Rows | str | Path,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        batch_size: Size,
        max_prompt_length: Length | None = None,
        num_generations: Size = 1,
        **options: Unpack[StreamOptions],
    ) -> None:
        """Check the numbers; nothing is read yet."""
        length: Any = {"max_length": max_prompt_length, "group_by_length": False}
        super().__init__(source, tokenizer, batch_size=batch_size, **length, **options)
        self.num_generations = num_generations

    def predict_dataloader(self) -> Any:
        """Return the loader of the held-out prompts, for `trainer.predict`."""
        return self.val_dataloader()

    def _spare_batches(self) -> tuple[int, bool]:
        algorithm = getattr(getattr(self.trainer, "lightning_module", None), "algorithm", None)
        count = getattr(algorithm, "num_spare_batches", 0)
        return count, bool(getattr(algorithm, "max_resampling_rounds", 0))

    def collator(self, *, training: bool) -> PromptCollator:
        """Return the function that makes a batch of encoded prompts."""
        shape = (self.num_generations, self.batch_size // self._world_size) if training else ()
        return PromptCollator(self._pad_token_id, *shape)

    def _identity(self, num_rows: int) -> dict[str, Any]:
        return super()._identity(num_rows) | {"num_generations": self.num_generations}
