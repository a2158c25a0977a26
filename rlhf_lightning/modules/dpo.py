"""Direct preference optimization: a policy learns from pairs, without a reward model or sampling.

KTO learns from single responses that have a label: its rows have their response on the chosen side
of the batch, and on the other a response to another prompt.

Legend: B pairs or rows, b those of a micro-batch, T tokens.

The log-probabilities of the reference, the policy that training starts from, are computed once,
before the first step. It is in memory only meanwhile; with adapters it is the base with its
adapters off. A run that is resumed computes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, Unpack

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import SumMetric

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.batches import PreferenceBatch
from rlhf_lightning.data.datamodules import PreferenceDataModule
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.distributed.collectives import (
    agreed_max,
    gathered,
    global_sum,
    rank,
    world_size,
)
from rlhf_lightning.functional.preference_losses import dpo_loss, kto_loss
from rlhf_lightning.functional.statistics import interval_over_groups
from rlhf_lightning.hparams import DPOHparams
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.models.forward import by_micro_batch, micro_batches, response_logprobs
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.lora import AdaptedPolicy
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules import pretrained
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.non_finite import finite
from rlhf_lightning.modules.optimization import Measured, Term
from rlhf_lightning.modules.options import ModuleOptions, ModuleParts
from rlhf_lightning.modules.placement import move_models

SPLITS = ("train", "validation")
ROWS_TOGETHER = 256  # of a rank, that are padded to one width
Rows = Sequence[EncodedPreference]


def side_logprobs(policy: PolicyModel, batch: PreferenceBatch, side: str) -> Tensor:
    """Return log-probabilities `[b]` of the responses on a side, `chosen` or `rejected`."""
    ids, mask = getattr(batch, f"{side}_input_ids"), getattr(batch, f"{side}_attention_mask")
    return response_logprobs(policy, ids, mask, getattr(batch, f"{side}_length"))


def pair_logprobs(policy: PolicyModel, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
    """Return log-probabilities `[b]` of the chosen and rejected responses, in one forward."""
    ids = torch.cat([batch.chosen_input_ids, batch.rejected_input_ids])  # [2b, T]
    mask = torch.cat([batch.chosen_attention_mask, batch.rejected_attention_mask])
    lengths = torch.cat([batch.chosen_length, batch.rejected_length])
    chosen, rejected = response_logprobs(policy, ids, mask, lengths).chunk(2)
    return chosen, rejected


class ReferenceLogprobs:
    """Tables `[N, 2]` of a run, by split: log-probabilities of both responses of each row.

    Rows that no batch needs are NaN.

    Args:
        build: builder of the reference.
        micro_batch_size: pairs in one forward.
    """

    def __init__(self, build: Callable[[], PolicyModel], micro_batch_size: int | None) -> None:
        self.build = build
        self.micro_batch_size = micro_batch_size
        self.tables: dict[str, Tensor] = {}

    def of(self, batch: PreferenceBatch, split: str) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `[b]` of the chosen and of the rejected responses of a batch."""
        chosen, rejected = self.tables[split][batch.row_ids].unbind(-1)
        return chosen, rejected

    def prepare(self, module: RLHFModule, splits: Sequence[str]) -> None:
        """Compute the log-probabilities of the rows that a run reads; each rank its share.

        Args:
            module: module that is trained; every rank calls.
            splits: required splits: all held-out rows, and the training rows of the run.

        Raises:
            ValueError: if the rows do not come from a `PreferenceDataModule`, or if the reference
                is not finite.
        """
        trainer: Any = module.trainer
        data = trainer.datamodule
        if data is None:
            raise ValueError(
                "DPO finds the reference by row: give fit or validate a PreferenceDataModule"
            )
        wanted: dict[str, Sequence[int]] = {split: range(len(data.rows(split))) for split in splits}
        if "train" in wanted:
            wanted["train"] = data.rows_of_batches(int(trainer.num_training_batches))
        count = sum(map(len, wanted.values()))
        rank_zero_info(f"Log-probabilities of {count:,} rows under the reference, once")
        reference = self._reference(module)
        with torch.no_grad(), trainer.strategy.precision_plugin.forward_context():
            for split, numbers in wanted.items():
                rows = data.rows(split)
                table = torch.full((len(rows), 2), torch.nan)
                asked, collate = [rows[row] for row in numbers], data.collator(training=True)
                table[list(numbers)] = self._of_rows(reference, asked, collate, module.device)
                if not table[list(numbers)].isfinite().all():
                    told = "the reference gives non-finite log-probabilities to responses"
                    raise ValueError(f"{told}: start from another policy")
                self.tables[split] = table.to(module.device)
        del reference
        release_freed_memory()

    def _reference(self, module: RLHFModule) -> PolicyModel:
        policy = module.policy
        if isinstance(policy, AdaptedPolicy):
            return frozen(AdaptedPolicy(policy.base, None))
        with module.sharing_models():
            reference = place_on_ranks(frozen(self.build()), frozen=True)
        move_models(module, [reference])
        return reference

    def _of_rows(
        self, reference: PolicyModel, rows: Rows, collate: Callable[..., Any], device: torch.device
    ) -> Tensor:
        """Return `[len(rows), 2]` on the CPU, the same on all ranks."""
        found = torch.zeros(len(rows), 2)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        share = order[rank() :: world_size()]
        for start in range(0, -(-len(rows) // world_size()), ROWS_TOGETHER):
            # A rank without a row left repeats one: ranks that shard compute together.
            chosen = share[start : start + ROWS_TOGETHER] or order[:1]
            batch = collate([rows[row] for row in chosen]).to(device)
            columns = by_micro_batch(
                lambda part, batch=batch: pair_logprobs(reference, batch[part]),  # type: ignore[misc]
                batch.either_attention_mask,
                self.micro_batch_size,
                agree=agreed_max,
            )
            if start < len(share):
                found[chosen] = torch.stack(columns, -1).float().cpu()
        return global_sum(found.to(device)).cpu()


CONFIDENCE = 0.95
MEASURES = (
    *("loss", "accuracy", "chosen_reward", "rejected_reward", "margin"),
    *("chosen_logprob", "rejected_logprob"),
)
# [2, 3] sums over rows with label True, False: 1, reward, log-probability
BY_LABEL = "by_label"  # no slash: a vector


class DPOModule(RLHFModule):
    """Raises the log-probability of preferred responses over that of rejected ones.

    Both are taken relative to the reference, the policy that training starts from. Its
    log-probabilities are computed before the first step, see `ReferenceLogprobs`.

    Args:
        dpo: hyper-parameters of DPO.
        policy: builds the model, and the reference where no adapter is trained.
        parts: further parts, see `ModuleParts`.

    Source: Rafailov et al. 2023, equation 7; Azar et al. 2023 (`kind="ipo"`); Ethayarajh et al.
    2024 (`kind="kto"`).
    """

    stage = "dpo"
    title = "DPO"
    kinds: ClassVar = {"dpo": DPOHparams}
    data = PreferenceDataModule
    batch = PreferenceBatch
    is_scored = True
    objective = "val/accuracy"
    algorithm: DPOHparams
    policy: PolicyModel | None

    @checked
    def __init__(
        self, *, dpo: DPOHparams, policy: Callable[[], PolicyModel], **parts: Unpack[ModuleParts]
    ) -> None:
        super().__init__(dpo, policy, **parts)
        self.references = ReferenceLogprobs(policy, dpo.micro_batch_size)
        self.policy = None
        self.sums = torch.nn.ModuleDict({name: SumMetric("disable") for name in MEASURES})
        self.validated: list[list[float]] = []  # by row: see `validation_step`
        self.prompts: list[bytes] = []  # of these rows

    @classmethod
    def title_of(cls, algorithm: Any) -> str:
        """Return IPO or KTO, if it is one of these."""
        return {"ipo": "IPO", "kto": "KTO"}.get(algorithm.kind, cls.title)

    @classmethod
    def kinds_of_records(cls, algorithm: Any) -> tuple[str, ...]:
        """Return the kind of the records that the objective is of."""
        return ("unpaired",) if algorithm.kind == "kto" else ("preferences",)

    @classmethod
    @checked
    def from_pretrained(
        cls, source: PathOrName, *, dpo: DPOHparams | None = None, **options: Unpack[ModuleOptions]
    ) -> Self:
        """Return the module that trains the policy `source`, loaded when training starts.

        Args:
            source: folder or hub name of the SFT policy, which is the reference too.
            dpo: hyper-parameters; the defaults of `DPOHparams`.
            options: further options, see `ModuleOptions`.
        """
        hparams = {"dpo": dpo or DPOHparams()}
        start = pretrained.Start.read(source, "source", options)
        return pretrained.of_one_model(cls, start, load_policy, "policy", hparams)

    def on_train_start(self) -> None:
        """Compute what the reference says of the pairs."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if self.algorithm.kind == "kto":
            warn_of_weights(self.algorithm, [row.label for row in data.rows("train")])
        elif isinstance(data, PreferenceDataModule) and any(r.margin for r in data.rows("train")):
            rank_zero_warn("the column 'margin' is not read: a reward model alone learns it")
        self.references.prepare(self, SPLITS)

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> dict[str, Tensor]:
        """Take one optimizer step on the batch of pairs, or of unpaired rows."""
        num_pairs = global_sum(torch.tensor(float(len(batch)), device=self.device))
        parts = micro_batches(
            batch.either_attention_mask,
            self.algorithm.micro_batch_size,
            sequences=1 if self.algorithm.kind == "kto" else 2,
        )
        term: Term = self.loss
        counts: Any = num_pairs
        if self.algorithm.kind == "kto":
            term, counts = self.unpaired_loss, (num_pairs, self.reference_point(batch, num_pairs))
        return self.learn(batch, batch_idx, parts, term, counts, size=num_pairs)

    def loss(self, batch: PreferenceBatch, num_pairs: Tensor | float) -> tuple[Tensor, Measured]:
        """Return the sum of the pairs' losses over `num_pairs`, and further sums over the same."""
        return self.compared(batch, *pair_logprobs(self.policy, batch), num_pairs, "train")

    def compared(
        self,
        batch: PreferenceBatch,
        chosen: Tensor,
        rejected: Tensor,
        num_pairs: Tensor | float,
        split: str,
    ) -> tuple[Tensor, Measured]:
        """Return loss and sums for log-probabilities `[b]` and those of the reference."""
        result = dpo_loss(
            chosen,
            rejected,
            *self.references.of(batch, split),
            beta=self.algorithm.beta,
            label_smoothing=self.algorithm.label_smoothing,
            kind=self.algorithm.kind,  # type: ignore[arg-type]
            num_pairs=num_pairs,
        )
        measures = {
            "loss": result.loss,
            "accuracy": result.accuracy,
            "chosen_reward": result.chosen_reward,
            "rejected_reward": result.rejected_reward,
            "margin": result.chosen_reward - result.rejected_reward,
            "chosen_logprob": chosen.sum() / num_pairs,
            "rejected_logprob": rejected.sum() / num_pairs,
        }
        return result.loss, {f"dpo/{name}": value for name, value in measures.items()}

    @torch.no_grad()
    def reference_point(self, batch: PreferenceBatch, num_rows: Tensor) -> Tensor:
        """Return KTO's KL over all micro-batches and ranks, from responses to other prompts."""
        (logprobs,) = by_micro_batch(
            lambda rows: (side_logprobs(self.policy, batch[rows], "rejected"),),
            batch.either_attention_mask,
            self.algorithm.micro_batch_size,
            agree=agreed_max,
        )
        _, reference = self.references.of(batch, "train")
        return (global_sum((logprobs - reference).sum()) / num_rows).clamp(min=0)

    def unpaired_loss(
        self, batch: PreferenceBatch, counts: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Measured]:
        """Return the sum of the rows' KTO losses over their number, and further sums.

        Args:
            batch: a micro-batch of unpaired rows.
            counts: rows of the optimizer step, and its `reference_point`.
        """
        num_rows, kl = counts
        logprobs = side_logprobs(self.policy, batch, "chosen")
        reference, _ = self.references.of(batch, "train")
        return self.labelled(logprobs, reference, batch.label, kl, num_rows)

    def labelled(
        self, logprobs: Tensor, reference: Tensor, label: Any, kl: Tensor, num_rows: Tensor | float
    ) -> tuple[Tensor, Measured]:
        """Return KTO's loss and sums for log-probabilities `[b]` and labels `[b]`."""
        result = kto_loss(
            logprobs,
            reference,
            label,
            kl=kl,
            beta=self.algorithm.beta,
            desirable_weight=self.algorithm.desirable_weight,
            undesirable_weight=self.algorithm.undesirable_weight,
            num_rows=num_rows,
        )
        rows = torch.stack([torch.ones_like(result.rewards), result.rewards, logprobs.detach()], -1)
        sides = torch.stack([label, ~label]).to(rows.dtype)  # [2, b]
        measures = {"dpo/loss": result.loss, "dpo/accuracy": result.accuracy}
        measures["dpo/kl"] = kl * (len(rows) / num_rows)
        return result.loss, measures | {BY_LABEL: sides @ rows}

    def reported(self, measured: Measured) -> Mapping[str, Tensor]:
        """Return the metrics from the sums of a step."""
        return by_label(measured)

    def on_validation_start(self) -> None:
        """Start the clock and place the base; before or without training, ask the reference."""
        super().on_validation_start()
        self.validated, self.prompts = [], []
        if self.trainer.state.fn != "fit" or self.trainer.sanity_checking:
            self.references.prepare(self, ("validation",))

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Add the held-out pairs to the sums."""
        # At the widths at which the reference was computed: rewards start at exactly 0.
        chosen, rejected = by_micro_batch(
            lambda rows: pair_logprobs(self.policy, batch[rows]),
            batch.either_attention_mask,
            self.algorithm.micro_batch_size,
            agree=agreed_max,
        )
        self.prompts += batch.prompt_keys
        columns = (chosen, rejected, *self.references.of(batch, "validation"))
        if self.algorithm.kind == "kto":  # its reference point is that of all held-out rows
            columns = (*columns, batch.label)  # type: ignore[assignment]
        self.validated += torch.stack(columns, -1).double().tolist()
        if self.algorithm.kind == "kto":
            return
        _, sums = self.compared(batch, chosen, rejected, 1.0, "validation")
        for name in MEASURES:
            self.sums[name].update(sums[f"dpo/{name}"])

    def on_validation_epoch_end(self) -> None:
        """Log the means over all held-out pairs of all ranks, accuracy with its interval."""
        found = [row for part in gathered(self.validated) for row in part]
        rows = torch.tensor(found, dtype=torch.float64)
        prompts = [prompt for part in gathered(self.prompts) for prompt in part]
        if self.algorithm.kind == "kto":
            right, measures = self._validated_rows(rows)
        else:
            chosen, rejected, *reference = rows.float().unbind(-1)  # as in the loss
            right = chosen - reference[0] > rejected - reference[1]
            total = {name: float(metric.compute()) for name, metric in self.sums.items()}
            measures = {f"val/{name}": value / len(rows) for name, value in total.items()}
        low, high = interval_over_groups(right.tolist(), prompts, confidence=CONFIDENCE)
        measures |= {"val/accuracy_low": low, "val/accuracy_high": high}
        measures["val/num_pairs"] = float(len(rows))
        measures["val/num_pair_prompts"] = float(len({*prompts}))
        self.log_dict(measures)
        self.log_validation_time()

    def _validated_rows(self, rows: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return which held-out rows are on the right side, and KTO's metrics over all of them."""
        own, other, reference, of_other, label = rows.unbind(-1)
        kl = (other - of_other).mean().clamp(min=0)
        _, measured = self.labelled(own, reference, label.bool(), kl, float(len(rows)))
        found = finite(by_label(measured))
        measures = {name.replace("dpo/", "val/"): value for name, value in found.items()}
        share = float(label.mean())
        right = torch.where(label.bool(), own - reference > kl, own - reference < kl)
        return right, measures | {"val/majority_accuracy": max(share, 1 - share)}


def warn_of_weights(hparams: DPOHparams, labels: Sequence[bool]) -> None:
    """Warn where one label is missing, or weighs more than twice what KTO's paper advises."""
    counts = [sum(labels), len(labels) - sum(labels)]
    weights = [hparams.desirable_weight, hparams.undesirable_weight]
    good, bad = (count * weight for count, weight in zip(counts, weights, strict=True))
    said = f"{counts[0]:,} training rows are labelled true and {counts[1]:,} false"
    if not all(counts):
        rank_zero_warn(f"{said}: KTO learns what sets the two apart, add rows of the other label")
    elif all(weights) and not bad / 2 <= good <= bad * 8 / 3:
        fix = f"desirable_weight={bad / counts[0]:.3g}"
        fix = fix if good < bad else f"undesirable_weight={good / counts[1]:.3g}"
        rank_zero_warn(
            f"{said}, which weigh {good:g} to {bad:g}, and KTO's paper advises 1 to 4/3 to 1: "
            f"module.dpo.{fix} makes them weigh the same"
        )


def by_label(measured: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return KTO's sums by label as means; NaN without such a row."""
    if BY_LABEL not in measured:
        return measured
    sums = measured[BY_LABEL]
    (chosen, rejected), logprobs = (sums[:, 1] / sums[:, 0]).unbind(), sums[:, 2] / sums[:, 0]
    means = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": chosen - rejected,
        "chosen_logprob": logprobs[0],
        "rejected_logprob": logprobs[1],
    }
    others = {name: value for name, value in measured.items() if name != BY_LABEL}
    return others | {f"dpo/{name}": value for name, value in means.items()}
