"""Files that a run writes as it goes: metrics, samples, and the batch that stopped it.

`metrics.csv`, `samples.jsonl`, `distributions.jsonl` and `faults/iteration=000012/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning import batches
from rlhf_lightning.arguments import Count, checked
from rlhf_lightning.batches import RolloutBatch, TensorBatch
from rlhf_lightning.callbacks import iterations
from rlhf_lightning.callbacks.iterations import current_iteration, fresh_metrics, writes
from rlhf_lightning.distributed.collectives import gathered
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.non_finite import NonFiniteError
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import MetricsAppender, RunFolder, SamplesAppender, to_json
from rlhf_lightning.text.decode import decoded, response_texts, text_behind


class MetricsLog(Callback):
    """Write the metrics of every iteration, and of its validation, as one row.

    A run that resumes cuts the file back to the iteration of its checkpoint; one that starts
    from nothing empties it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._row: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up the file; nothing is cut before there is something to write."""
        self._appender, self._written = MetricsAppender(self.folder.metrics), -1

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Write the row, unless a validation is about to add to it."""
        self._row = fresh_metrics(trainer)
        if not iterations.validation_follows(trainer):
            self._write(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the row together with what the validation logged."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._row |= fresh_metrics(trainer)
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not writes(trainer):
            return
        iteration = current_iteration(trainer)
        if self._written != iteration - 1:  # at a start, or where a validation follows the row
            self._appender.truncate(iteration - 1)
        # NaN says that something was not measured, as an empty cell does.
        measured = {name: value for name, value in self._row.items() if value == value}
        self._appender.append(iteration, measured)
        self._written = iteration


class SampleLog(Callback):
    """Write the first rows of a rollout, at the first and last iteration and every few between.

    It also writes the scores and lengths of all its rows, on all ranks.

    Args:
        folder: folder of the run.
        every_n_iterations: iterations between two writes.
        num_samples: number of rows each time.

    Raises:
        ValueError: for a number below 1.
    """

    @checked
    def __init__(
        self, folder: RunFolder, *, every_n_iterations: Count = 10, num_samples: Count = 8
    ) -> None:
        self.folder = folder
        self.every_n_iterations = every_n_iterations
        self.num_samples = num_samples
        self._appender = SamplesAppender(folder.samples)
        self._values = SamplesAppender(folder.distributions)
        self._cut_at: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember where the run starts; nothing is cut before there is something to write."""
        self._cut_at = current_iteration(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write samples if it is time and the step returned `{"rollout": RolloutBatch}`."""
        iteration = current_iteration(trainer)
        rollout = outputs.get("rollout") if isinstance(outputs, Mapping) else None
        ends = iteration == 1 or iterations.is_last_iteration(trainer)
        due = ends or iteration % self.every_n_iterations == 0
        if rollout is None:
            return
        ranks = gathered(rollout_values(rollout)) if due else []
        if not writes(trainer):
            return
        if self._cut_at is not None:
            self._appender.truncate(self._cut_at)
            self._values.truncate(self._cut_at)
            self._cut_at = None
        if due:
            module = cast(OnPolicyModule, pl_module)
            skip, count = module.sampling.skip_special_tokens, self.num_samples
            rows = describe_rollout(rollout, module.tokenizer, count, skip_special_tokens=skip)
            self._appender.append(iteration, rows)
            values = {name: [x for own in ranks for x in own[name]] for name in ranks[0]}
            self._values.append(iteration, [values])


def rollout_values(rollout: RolloutBatch) -> dict[str, list[float]]:
    """Return what `distributions.jsonl` has of a rollout, a number a response.

    `score` (unshaped, NaN where the scorer does not apply), `length` (response tokens) and, where a
    prompt has several responses, `groups`: how many each prompt has, in order.
    """
    lengths = rollout.response_mask.sum(1).tolist()
    values = {"score": rollout.known_scores.tolist(), "length": lengths}
    groups = rollout.group_ids.unique_consecutive(return_counts=True)[1].tolist()
    return values if len(groups) == len(rollout) else values | {"groups": groups}


def describe_rollout(
    rollout: RolloutBatch, tokenizer: PreTrainedTokenizerBase, num_samples: int, **how: bool
) -> list[dict[str, Any]]:
    """Return the first rows of a rollout as plain values; `how` is that of `response_texts`.

    Each has `prompt` (without special tokens), `response` (as a scorer is given it), `score`
    (unshaped; None where the scorer does not apply), `kl` (mean k1 over the response tokens, nats
    per token), `length` (response tokens, EOS included), `domain` and `finished` (True if a stop
    token ended it).
    """
    rows = rollout[: min(num_samples, len(rollout))].to("cpu")
    mask = rows.response_mask
    length = mask.sum(1)  # [B]
    kl = ((rows.logprobs - rows.ref_logprobs) * mask).sum(1) / length.clamp(min=1)  # [B]
    prompt_mask, scores = rows.attention_mask[:, : rows.prompt_length], rows.known_scores
    samples = []
    for i in range(len(rows)):
        prompt = rows.query_tensors[i][prompt_mask[i]].tolist()
        response = rows.response_tensors[i][mask[i]].tolist()
        finished = rows.finish_reason[i].item() == batches.FINISHED_BY_STOP
        written = response[:-1] if finished else response
        (text,) = response_texts([prompt], [written], tokenizer, **how)
        samples.append(
            {
                "prompt": decoded(prompt, tokenizer, skip_special_tokens=True),
                "response": text,
                "score": None if scores[i].isnan() else scores[i].item(),
                "kl": kl[i].item(),
                "length": int(length[i]),
                "domain": rows.domains[i],
                "finished": finished,
            }
        )
    return samples


class SaveFaultyBatch(Callback):
    """Save the batch that a run stopped at, each rank its own rows.

    `rank_0.safetensors` holds its tensors by field, `rank_0.jsonl` a line a row with the texts and
    the names of the fields that are not finite.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save the batch of a `NonFiniteError`, and let the error say where it is."""
        if not isinstance(exception, NonFiniteError):
            return
        folder = self.folder.faults / f"iteration={exception.iteration:06d}"
        stem = folder / f"rank_{trainer.global_rank}"
        batch = exception.batch.to("cpu")
        rows = describe_rows(batch, cast(RLHFModule, pl_module).tokenizer)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.contiguous().clone() for name, value in _tensors(batch)}
        save_file(tensors, stem.with_suffix(".safetensors"))
        write_text(stem.with_suffix(".jsonl"), "".join(to_json(row) + "\n" for row in rows))
        exception.saved = str(folder)


def describe_rows(
    batch: TensorBatch, tokenizer: PreTrainedTokenizerBase | None
) -> list[dict[str, Any]]:
    """Return each row as plain values: texts, numbers, and `not_finite`, the fields that are not.

    Special tokens are kept in the texts; without a tokenizer there are the ids.
    """
    rows: list[dict[str, Any]] = [{"row": i} for i in range(len(batch))]
    before: list[list[int]] = []
    for name, ids, mask in _texts(batch):
        own = [ids[i][mask[i]].tolist() for i in range(len(rows))]
        for i, row in enumerate(rows):
            if tokenizer is None:
                row[name] = own[i]
            elif name == "response":
                row[name] = text_behind(before[i], own[i], tokenizer)
            else:
                row[name] = decoded(own[i], tokenizer)
        before = own
    columns: dict[str, Any] = {k: v for k, v in vars(batch).items() if isinstance(v, tuple)}
    columns |= {name: value.tolist() for name, value in _tensors(batch) if value.dim() == 1}
    for i, row in enumerate(rows):
        row |= {name: value[i] for name, value in columns.items()}
        if odd := [n for n, value in _tensors(batch) if not bool(value[i].isfinite().all())]:
            row["not_finite"] = odd
    return rows


def _tensors(batch: TensorBatch) -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{k}", v) for k, v in value.items() if isinstance(v, Tensor))


def _texts(batch: TensorBatch) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, ids and mask of each text of a row."""
    if isinstance(batch, RolloutBatch):
        yield "prompt", batch.query_tensors, batch.attention_mask[:, : batch.prompt_length]
        yield "response", batch.response_tensors, batch.response_mask
    elif isinstance(batch, batches.PreferenceBatch):
        yield "chosen", batch.chosen_input_ids, batch.chosen_attention_mask
        yield "rejected", batch.rejected_input_ids, batch.rejected_attention_mask
    elif isinstance(batch, batches.SFTBatch):
        yield "text", batch.input_ids, batch.attention_mask
