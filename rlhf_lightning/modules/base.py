"""Base of the modules: models, optimizer, checkpoints, checks of the Trainer, responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, Seed, Size, Temperature, checked
from rlhf_lightning.batches import PromptBatch, TensorBatch
from rlhf_lightning.data.collate import PromptCollator
from rlhf_lightning.data.encode import encode_prompt
from rlhf_lightning.data.record_datamodule import RecordDataModule
from rlhf_lightning.data.sources.given import GivenRows, as_prompt_rows, of_collated_rows
from rlhf_lightning.distributed.collectives import (
    check_same_on_all_ranks,
    clip_grad_norm,
    rank,
    unsharded,
)
from rlhf_lightning.hparams import (
    DPOHparams,
    OnPolicyHparams,
    RewardHparams,
    SamplingHparams,
    SFTHparams,
)
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.classifiers import prompt_room
from rlhf_lightning.models.learning_rates import Kind
from rlhf_lightning.modules import checks, pretrained
from rlhf_lightning.modules.checkpoint_state import Stateful, load_states, save_states
from rlhf_lightning.modules.metrics import LoggedNames
from rlhf_lightning.modules.non_finite import SkippedSteps, finite
from rlhf_lightning.modules.optimization import (
    IterationSchedule,
    Measured,
    Optimizer,
    Schedule,
    Term,
    accumulate_gradients,
    check_optimizer,
    parameter_group,
    warn_of_unused_rate,
)
from rlhf_lightning.modules.placement import move_models, set_micro_batch_tokens, sharing_models
from rlhf_lightning.rollout.generators.base import Generator, gathers_layers
from rlhf_lightning.rollout.generators.captured import CapturedGenerator
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import Responses
from rlhf_lightning.runs.manifest import Source
from rlhf_lightning.text.tokenizers import stop_ids
from rlhf_lightning.text.tokens import TextEncoder

Hparams = SFTHparams | RewardHparams | DPOHparams | OnPolicyHparams


class RLHFModule(L.LightningModule):
    """Base of the modules: one optimizer step, or several, on each batch of a DataModule.

    Args:
        algorithm: hyper-parameters of the algorithm.
        build: builds what is trained.
        parts: further parts, see `ModuleParts`.

    Attributes:
        stage: first part of the names of its metrics, and its place in a configuration.
        title: the training in words, as in a sentence; by default the stage.
        kinds: classes of its hyper-parameters, by the names of the arguments.
        data: the DataModule that it trains on.
        batch: what that DataModule gives.
        rate: kind of model, for the default learning rate.
        unit: unit of its throughput.
        starts_from: the key below `artifacts` of the model that it starts from.
        trains_policy: whether it trains a policy; else it trains a reward model.
        rolls_out: whether it samples and scores responses during training, beside a reference.
        is_scored: whether a scorer, if there is one, judges the final comparison.
        objective: the final metric that a sweep looks at: never gold, which may not choose.
        maximised: whether more of it is better.
        source: the model that it starts from, as it was when the module was made.
        more_sources: further models that it must find again when a run is resumed, likewise.
        fitted_by: the Trainer of the last fit, whatever Trainer has the module since.
        num_steps: optimizer steps of an iteration, at most.
        learning_rate_factor: multiplies the learning rates of the schedule.
    """

    stage: ClassVar[str]
    title: ClassVar[str] = ""
    kinds: ClassVar[Mapping[str, type]] = {}
    data: ClassVar[type[RecordDataModule]]
    batch: ClassVar[type[TensorBatch]]
    rate: ClassVar[Kind] = "policy"
    unit: ClassVar[str] = "pairs"
    starts_from: ClassVar[str] = "sft"
    trains_policy: ClassVar[bool] = True
    rolls_out: ClassVar[bool] = False
    is_scored: ClassVar[bool] = False
    objective: ClassVar[str] = "val/score_win_rate"
    maximised: ClassVar[bool] = True
    algorithm: Hparams
    policy: Any
    source: Source | None = None
    more_sources: tuple[Source, ...] = ()
    tokenizer: PreTrainedTokenizerBase | None
    sampling = SamplingHparams()
    generator: Generator | None = None
    sums: Any  # torchmetrics of a validation, by name; not of on-policy modules
    validation_started = batch_started = 0.0
    fitted_by: L.Trainer | None = None
    num_asked = 0  # prompts of a prediction so far, on this rank
    num_steps = 1
    learning_rate_factor = 1.0

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a subclass whose hook leaves out ours."""
        super().__init_subclass__(**given)
        checks.check_hooks(cls)

    def __init__(
        self,
        algorithm: Hparams,
        build: Callable[[], Any],
        *,
        optimizer: Optimizer,
        schedule: Schedule,
        fingerprint: str = "",
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.algorithm = algorithm
        self.build_models = build
        self.build_optimizer = optimizer
        self.schedule = schedule
        self.fingerprint = fingerprint
        self.compute_dtype = compute_dtype
        self.tokenizer = None
        self.logged_names = LoggedNames()
        key = f"module.{self.stage}.max_skipped_steps"
        self.skipped = SkippedSteps(algorithm.max_skipped_steps, key)

    # -- made from names --------------------------------------------------------------------

    def keep(self, begun: pretrained.Start, /, **given: Any) -> None:
        """Keep what the module was built from, in `hparams` and in checkpoints."""
        self.save_hyperparameters(pretrained.plain(given | begun.kept))
        self.source = begun.source

    @classmethod
    @checked
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: PathOrName, **changes: Any
    ) -> Self:
        """Return a module with the weights of a checkpoint, on the CPU, in eval mode.

        Args:
            checkpoint_path: a checkpoint of a module that `from_pretrained` built.
            changes: arguments of `from_pretrained` that are to differ.

        Raises:
            ValueError: if the checkpoint holds no hyper-parameters, or if its model runs code and
                `changes` do not say `trust_remote_code=True`.
        """
        return cls._restored(checkpoint_path, changes)

    @classmethod
    def _restored(cls, path: PathOrName, changes: Mapping[str, Any]) -> Self:
        checkpoint, given = pretrained.read_checkpoint(path, changes)
        given = {**pretrained.revived(given, cls.kinds), **changes}
        cls.check_kept(path, given, changes)
        module: Self = cls.from_pretrained(**given)  # type: ignore[attr-defined]
        module.configure_model()
        module.load_state_dict(checkpoint["state_dict"])
        module.on_load_checkpoint(checkpoint)
        return module.eval()

    @classmethod
    def check_kept(
        cls, path: PathOrName, given: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> None:
        """Check that a checkpoint's arguments build the module without running code."""

    # -- models and optimizer ---------------------------------------------------------------

    @classmethod
    def title_of(cls, algorithm: Any) -> str:
        """Return the training in words, with these hyper-parameters."""
        return cls.title or cls.stage

    @classmethod
    def kinds_of_records(cls, algorithm: Any) -> Sequence[str]:
        """Return the kinds of records that it learns from, with these hyper-parameters."""
        return cls.data.kinds

    @property
    def trained(self) -> Any:
        """The model that is trained, or the first one; None before it is built."""
        return self.policy

    @property
    def roots(self) -> Sequence[nn.Module]:
        """Models that the module itself moves to the device."""
        return [self.trained.root]

    def configure_model(self) -> None:
        """Build the models, and shard each if ranks share them."""
        if self.trained is None:
            with self.sharing_models():
                self.take(self.build_models())

    def sharing_models(self) -> AbstractContextManager[None]:
        """Shard the models that are built inside, if ranks share them."""
        if self.device_mesh is not None:
            strategy: Any = self.trainer.strategy
            self.compute_dtype = self.compute_dtype or strategy.compute_dtype
        return sharing_models(self, self.compute_dtype, self.source, *self.more_sources)

    def take(self, built: Any) -> None:
        """Take what `build_models` has built."""
        self.policy = built
        place_on_ranks(built.root)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizer, with their learning rates."""
        return [parameter_group(self.trained, self.rate, self.algorithm.learning_rate)]

    def configure_optimizers(self) -> dict[str, Any]:
        """Make the optimizer; the schedule counts iterations.

        Raises:
            ValueError: for an optimizer that climbs or divides by 0.
        """
        optimizer = self.build_optimizer(self.parameter_groups())
        check_optimizer(optimizer)
        warn_of_unused_rate(optimizer)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = IterationSchedule(
            optimizer, self.schedule, total, lambda: self.learning_rate_factor
        )
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    # -- the Trainer ------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        """Refuse flags that would train something else, or fail later, before models are read."""
        checks.check_trainer(self.trainer)
        return []

    def on_fit_start(self) -> None:
        """Refuse data and weights that would train something else; place what is no submodule."""
        check_same_on_all_ranks("start", self.fingerprint)
        for source in self.more_sources:
            check_same_on_all_ranks(source.key, source.fingerprint)
        checks.check_data(self)
        checks.check_module(self)
        move_models(self, self.roots)
        set_micro_batch_tokens(self)
        if not self.training:
            self.train()  # it may be from a checkpoint, with dropout
        if number := rank():  # or ranks, which are seeded alike, would drop the same
            torch.manual_seed(torch.initial_seed() % 2**40 + (number << 40))
        self.fitted_by = self.trainer

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the Trainer, as Lightning does."""
        return super().__getstate__() | {"fitted_by": None}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the clock of the iteration.

        Raises:
            TypeError: for a batch of another DataModule.
        """
        self.batch_started = time.perf_counter()
        if not isinstance(batch, self.batch):
            given, wanted = type(batch).__name__, self.batch.__name__
            told = f"{type(self).__name__} was given a batch that is {given}, expected {wanted}"
            raise TypeError(f"{told}: use fit(module, datamodule={self.data.__name__}(...))")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Refuse a training step that trains nothing."""
        checks.check_trained(self)

    def on_validation_start(self) -> None:
        """Start the clock; place the base of an adapter, where no training came before."""
        self.validation_started = time.perf_counter()
        move_models(self, self.roots)
        for metric in getattr(self, "sums", {}).values():
            metric.reset()  # here: `fit` cannot add to what `validate` made in inference mode

    def log_validation_time(self) -> None:
        """Log the seconds of a validation, if it is one of a training."""
        if self.trainer.state.fn == "fit":
            self.log("time/validate", time.perf_counter() - self.validation_started)

    def on_train_end(self) -> None:
        """Refuse to end well if no step was taken."""
        self.skipped.end_run()

    # -- checkpoints ------------------------------------------------------------------------

    def stateful(self) -> dict[str, Stateful]:
        """Return what changes during a run and is no parameter, by its name in a checkpoint."""
        return {"skipped_steps": self.skipped} | {it.key: it for it in self.more_sources}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state, and the fingerprint of the model's source."""
        save_states(checkpoint, self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the state back.

        Raises:
            ValueError: if the model's source, the adapters, or the seed are others than the
                checkpoint was trained with.
        """
        load_states(checkpoint, self)

    # -- training ---------------------------------------------------------------------------

    def learn(
        self,
        batch: TensorBatch,
        batch_idx: int,
        parts: list[Tensor],
        term: Term,
        counts: Any,
        *,
        size: Tensor,
    ) -> dict[str, Tensor]:
        """Take one optimizer step on a batch, log it, and return its loss for the callbacks.

        Args:
            batch: this rank's share of the batch.
            batch_idx: number of the iteration, from 0.
            parts: rows of each micro-batch.
            term: term of the loss.
            counts: global counts that it divides by.
            size: amount of data in the step, over all ranks, in `unit`.
        """
        measured = accumulate_gradients(self, batch, parts, [term], counts)
        optimizer: Any = self.optimizers()
        learning_rate = optimizer.param_groups[0]["lr"]
        norm = clip_grad_norm(self.trained.parameters(), self.algorithm.max_grad_norm)
        norms = {f"{self.stage}/grad_norm": norm}
        took_step = self.skipped.should_step(measured | norms, batch, batch_idx)
        if took_step:
            optimizer.step()
        optimizer.zero_grad()
        self.lr_schedulers().step()  # type: ignore[call-arg]
        seconds = time.perf_counter() - self.batch_started
        measures = finite(self.reported(measured | norms if took_step else measured)) | {
            f"{self.stage}/skipped_steps": self.skipped.end_iteration(),
            f"{self.stage}/learning_rate": learning_rate,
            "time/update": seconds,
            f"throughput/{self.unit}_per_second": float(size) / seconds,
        }
        self.log_dict(self.logged_names.with_nans(measures))
        return {"loss": loss} if (loss := measured.get(f"{self.stage}/loss")) is not None else {}

    def reported(self, measured: Measured) -> Mapping[str, Tensor]:
        """Return the metrics from the sums of a step."""
        return measured

    # -- responses --------------------------------------------------------------------------

    @checked(but=("prompts",))
    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]],
        *,
        max_new_tokens: Size | None = None,
        temperature: Temperature | None = None,
        batch_size: Size = 64,
        seed: Seed = 1,
    ) -> list[str]:
        """Return the policy's response to each prompt, as reward functions receive it.

        Args:
            prompts: texts, conversations, or rows with the key `prompt`.
            max_new_tokens: longest response in tokens; None for the module's, or 64 where it has
                none.
            temperature: sampling temperature, 0 for the likeliest token; None for the module's, or
                1.
            batch_size: prompts in one batch of generation.
            seed: seeds the sampling noise.

        Raises:
            TypeError: if the module has no policy, or `prompts` is no list.
            ValueError: if a prompt is not readable, or leaves no room for a response.
        """
        self._check_policy()
        rows, noise = as_prompt_rows(prompts), RowNoise(seed, "generate")
        length = max_new_tokens or self.sampling.max_new_tokens
        return self._answers(rows, range(len(rows)), noise, batch_size, length, temperature)

    def on_predict_start(self) -> None:
        """Number the prompts of a prediction from 0.

        Raises:
            TypeError: for a list of rows: Lightning takes each for a loader, of its keys.
        """
        self.num_asked = 0
        loaders = self.trainer.predict_dataloaders
        if isinstance(loaders, list | tuple) and any(isinstance(one, Mapping) for one in loaders):
            told = "predict was given rows, and a Trainer takes each for a loader"
            fix = "give DataLoader(rows, batch_size=..., collate_fn=list), or module.generate(rows)"
            raise TypeError(f"{told}: {fix}")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[str]:
        """Return the responses to a `PromptBatch`, or to prompts as `generate` takes them.

        Prompts that are no `PromptBatch` are numbered over all batches and ranks, as they stand in
        the data: two of the same text get different noise.
        """
        self._check_policy()
        noise, length = RowNoise(1, "generate"), self.sampling.max_new_tokens
        if isinstance(batch, PromptBatch):
            return self._written(batch, noise, length)
        rows = as_prompt_rows(of_collated_rows(batch))
        ranks = self.trainer.world_size
        first = self.global_rank + ranks * self.num_asked
        self.num_asked += len(rows)
        numbers = range(first, first + ranks * len(rows), ranks)
        return self._answers(rows, numbers, noise, len(rows), length)

    def _check_policy(self) -> None:
        if not hasattr(self, "policy"):
            raise TypeError(f"{type(self).__name__} has no policy: it scores responses")

    def _answers(
        self,
        rows: Sequence[Mapping[str, Any]],
        numbers: Sequence[int],
        noise: RowNoise,
        batch_size: int,
        length: int,
        temperature: float | None = None,
    ) -> list[str]:
        """Return the response to each prompt, whose noise is that of its number."""
        if self.policy is None:
            self.configure_model()
        room = prompt_room(self.policy, 2**31, length)
        batches = _batches(rows, numbers, self.tokenizer, room, batch_size)
        each = (self._written(batch, noise, length, temperature) for batch in batches)
        return [text for texts in each for text in texts]

    def _written(
        self, prompts: PromptBatch, noise: RowNoise, length: int, temperature: float | None = None
    ) -> list[str]:
        tokenizer: Any = self.tokenizer
        generator = self.generator or CapturedGenerator(
            stop_ids(tokenizer), int(tokenizer.pad_token_id)
        )
        temperature = self.sampling.temperature if temperature is None else temperature
        prompts = prompts.to(self.policy.device)
        gathered = unsharded(self.policy.root, layers=gathers_layers(generator))
        with gathered, self.policy.generating() as model:
            generation = generator(
                model, prompts, noise=noise, temperature=temperature, max_new_tokens=length
            )
        skip = self.sampling.skip_special_tokens
        answers = Responses.of(prompts, generation, tokenizer, skip_special_tokens=skip)
        return list(answers.completions)


def _batches(
    rows: Sequence[Mapping[str, Any]],
    numbers: Sequence[int],
    tokenizer: Any,
    room: int,
    batch_size: int,
) -> Iterator[PromptBatch]:
    records: Any = GivenRows(rows, "prompts", validation_fraction=0).prompts()
    encoded, encoder = [], TextEncoder(tokenizer)
    for number, record in enumerate(records):
        row = encode_prompt(record, encoder, max_length=room)
        if row is None:
            told = f"prompt {number + 1} of {len(rows)} has no token, or more than {room}"
            raise ValueError(f"{told}: shorten it, or lower max_new_tokens")
        encoded.append((row, numbers[number]))
    collate = PromptCollator(int(tokenizer.pad_token_id))
    for start in range(0, len(encoded), batch_size):
        yield collate(encoded[start : start + batch_size])
