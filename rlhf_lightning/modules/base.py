"""What every module does alike: refuse flags of a Trainer, and write responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import lightning as L
import torch
from lightning.pytorch import Callback

from rlhf_lightning.arguments import PathOrName, Seed, Size, Temperature, checked
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.collate import PromptCollator
from rlhf_lightning.data.encode import encode_prompt
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.distributed.collectives import check_same_on_all_ranks, unsharded
from rlhf_lightning.models.building import completed
from rlhf_lightning.models.classifiers import max_positions
from rlhf_lightning.modules import pretrained
from rlhf_lightning.modules.checkpoint_state import (
    Stateful,
    compare_hyper_parameters,
    load_states,
    save_states,
)
from rlhf_lightning.modules.non_finite import SkippedSteps
from rlhf_lightning.modules.placement import move_models, sharing_models
from rlhf_lightning.modules.trainer_flags import check_steps, check_trainer
from rlhf_lightning.rollout.generators.base import CachedGenerator, gathers_layers
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import make_answers
from rlhf_lightning.runs.source import Source
from rlhf_lightning.text.tokenizers import stop_ids
from rlhf_lightning.text.tokens import TextEncoder


class SameStart(Callback):
    """Stops before the first batch if a rank starts from another model."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the fingerprints of the source."""
        check_same_on_all_ranks("start", str(getattr(pl_module, "fingerprint", "")))


class RLHFModule(L.LightningModule):
    """Base of the modules.

    Attributes:
        kinds: classes of its hyper-parameters, by the names of the arguments.
        source: the model that it starts from, as it was when the module was made.
    """

    kinds: ClassVar[Mapping[str, type]] = {}
    source: Source | None = None
    policy: Any
    fingerprint: str
    skipped: SkippedSteps

    @property
    def trained(self) -> Any:
        """The model whose adapters a checkpoint is compared with; None before it is built."""
        return self.policy

    def stateful(self) -> dict[str, Stateful]:
        """Return what changes during a run and is no parameter, by its name in a checkpoint."""
        return {"skipped_steps": self.skipped}

    def on_train_end(self) -> None:
        """Refuse to end well if no step was taken."""
        self.skipped.end_run()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state, and the fingerprint of the model's source."""
        save_states(checkpoint, self.fingerprint, self.trained, **self.stateful())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the state back.

        Raises:
            ValueError: if the model's source, the scale of an adapter, or the seed is another one
                than the checkpoint was trained with.
        """
        load_states(checkpoint, self.fingerprint, self.trained, **self.stateful())
        compare_hyper_parameters(checkpoint, self)

    def configure_callbacks(self) -> list[Callback]:
        """Refuse the flags that a Trainer refuses by itself, and name the setting to use."""
        check_steps(self.trainer)
        return [SameStart()]

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
        """Return the policy's response to each prompt, as reward functions are given it.

        Args:
            prompts: texts, conversations, or rows with the key `prompt`.
            max_new_tokens: of a response; None for the module's own, or 64 where it has none.
            temperature: of sampling, 0 for the likeliest token; None for the module's own, or 1.
            batch_size: prompts that are answered together.
            seed: seeds the sampling noise.

        Raises:
            TypeError: if the module has no policy, or `prompts` is no list.
            ValueError: if a prompt is not readable, or leaves no room for a response.
        """
        if not hasattr(self, "policy"):
            raise TypeError(f"{type(self).__name__} has no policy: it scores responses")
        is_one = isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable)
        if is_one or getattr(prompts, "shape", None) == ():
            got = f"{repr(prompts)[:100]} is {type(prompts).__name__}"
            raise TypeError(f"prompts={got}, expected a list: give [prompt]")
        if self.policy is None:
            self.configure_model()
        rows = [p if isinstance(p, Mapping) else {"prompt": p} for p in prompts]
        if not rows:
            raise ValueError(f"prompts={prompts!r} is empty: give at least one")
        sampling = getattr(self, "sampling", None)
        length = max_new_tokens or getattr(sampling, "max_new_tokens", 64)
        policy: Any = self.policy
        room = (max_positions(policy.model) or 2**31) - length
        if room < 1:
            raise ValueError(
                f"max_new_tokens={length} leaves no room for a prompt in the {room + length} "
                "positions of the policy: use less"
            )
        texts: list[str] = []
        for batch in _batches(rows, self.tokenizer, room, batch_size):
            texts += self._written(batch, length, temperature, RowNoise(seed, "generate"))
        return texts

    def predict_step(self, batch: Any, batch_idx: int) -> list[str]:
        """Return the responses to a `PromptBatch`, or to prompts as `generate` takes them."""
        if not isinstance(batch, PromptBatch):
            return self.generate([batch] if isinstance(batch, str) else batch)
        length = getattr(getattr(self, "sampling", None), "max_new_tokens", 64)
        return self._written(batch, length, None, RowNoise(1, "generate"))

    def _written(
        self, prompts: PromptBatch, length: int, temperature: float | None, noise: RowNoise
    ) -> list[str]:
        policy: Any = self.policy
        tokenizer: Any = self.tokenizer
        generator = getattr(self, "generator", None)
        if generator is None:
            source = self.hparams.get("policy")
            generator = CachedGenerator(stop_ids(tokenizer, source), int(tokenizer.pad_token_id))
        if temperature is None:
            temperature = getattr(getattr(self, "sampling", None), "temperature", 1.0)
        prompts = prompts.to(policy.device)
        gathered = unsharded(policy.root, layers=gathers_layers(generator))
        with gathered, policy.generating() as model:
            generation = generator(
                model, prompts, noise=noise, temperature=temperature, max_new_tokens=length
            )
        skip = skips_special_tokens(self)
        answers = make_answers(prompts, generation, tokenizer, skip_special_tokens=skip)
        return list(answers.completions)


class OneModelModule(RLHFModule):
    """Base of the modules that train one model on records."""

    build_policy: Callable[[], Any]
    sums: Any
    validation_started = 0.0

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
        checkpoint, given = pretrained.read_checkpoint(checkpoint_path, changes)
        made: Any = cls
        given = pretrained.revived(given, cls.kinds) | changes
        return cast(Self, pretrained.restored(made.from_pretrained(**given), checkpoint))

    def configure_model(self) -> None:
        """Build the model, and shard it if ranks share it."""
        if self.policy is None:
            with sharing_models(self):
                self.policy = self.build_policy()
                completed(self.policy.root)

    def on_fit_start(self) -> None:
        """Refuse flags that would train something else; place the base of an adapter."""
        check_trainer(self.trainer)
        move_models(self, [self.trained.root])

    def on_validation_start(self) -> None:
        """Start the clock; place the base of an adapter, where no training came before."""
        self.validation_started = time.perf_counter()
        move_models(self, [self.trained.root])
        for metric in self.sums.values():
            metric.reset()  # here: `fit` cannot add to what `validate` made in inference mode


def skips_special_tokens(module: Any) -> bool:
    """Return whether texts of a module's responses are without special tokens."""
    sampling = getattr(module, "sampling", None)
    return bool(getattr(sampling, "skip_special_tokens", False))


def _batches(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, room: int, batch_size: int
) -> Iterator[PromptBatch]:
    records: Any = GivenRows(rows, "prompts", validation_fraction=0).records("prompts", "train")
    encoded, encoder = [], TextEncoder(tokenizer)
    for number, record in enumerate(records):
        row = encode_prompt(record, encoder, max_length=room)
        if row is None:
            raise ValueError(
                f"prompt {number + 1} of {len(rows)} has no token, or more than the {room} that "
                "leave room for a response: shorten it, or lower max_new_tokens"
            )
        encoded.append((row, number))
    collate = PromptCollator(int(tokenizer.pad_token_id))
    for start in range(0, len(encoded), batch_size):
        yield collate(encoded[start : start + batch_size])
