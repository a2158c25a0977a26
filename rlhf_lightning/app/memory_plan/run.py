"""The run that is planned: shapes of models, precision, batches, devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, PretrainedConfig

from rlhf_lightning.app.stages.spec import Stage
from rlhf_lightning.hparams import LoraHparams, Precision
from rlhf_lightning.models.factory import set_dropout
from rlhf_lightning.models.micro_batching import TOKENS
from rlhf_lightning.runs.reading import read_json


class ShapeError(ValueError):
    """The shape of a model is missing, or transformers does not know it."""


@dataclass(frozen=True)
class Shape:
    """A model's config fields, `model_type` among them."""

    fields: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Check that transformers can make a config of the fields."""
        missing = [str(key) for key, value in self.fields.items() if value == "???"]
        if "model_type" not in self.fields or missing:
            what = missing[0] if missing else "model_type"
            raise ShapeError(
                f"the shape of the model lacks {what}: model.shape needs the fields of its "
                "config.json, model_type among them"
            )
        try:
            self.config()
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ShapeError(f"model.shape makes no config: {error}") from error

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config().num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.config().vocab_size)

    def config(self, num_layers: int | None = None) -> PretrainedConfig:
        """Return the config without dropout, with another number of layers if one is given."""
        config = AutoConfig.for_model(**self.fields)
        if num_layers is not None:
            config.num_hidden_layers = num_layers
            for name, value in vars(config).items():
                # Some architectures list a kind for each layer.
                if name.endswith("layer_types") and isinstance(value, list):
                    setattr(config, name, value[:num_layers])
        return set_dropout(config, 0.0)


def read_shape(folder: Path) -> Shape:
    """Return the shape of a model in a local folder.

    Raises:
        ShapeError: if it has no readable config.json.
    """
    file = folder / "config.json"
    try:
        fields = read_json(file)
    except (OSError, ValueError) as error:
        raise ShapeError(f"no config.json can be read in {folder}: {error}") from error
    if not isinstance(fields, dict):
        raise ShapeError(f"{file} holds no JSON object")
    return Shape(fields)


@dataclass(frozen=True)
class Style:
    """Precision, adapters and checkpointing of the models.

    Args:
        precision: the Trainer's, `32-true` or `bf16-mixed`.
        compute_dtype: dtype of gathered weights under FSDP2; None computes in the weights' dtype.
        lora: adapters on one frozen base, or None for full fine-tuning.
        activation_checkpointing: whether trained models use it.
        value_trainable: patterns of what is trained of the value model; None for all.
    """

    precision: Precision
    compute_dtype: torch.dtype | None = None
    lora: LoraHparams | None = None
    activation_checkpointing: bool = False
    value_trainable: tuple[str, ...] | None = None

    @property
    def autocast(self) -> bool:
        """True if forwards run under autocast in bf16."""
        return self.precision == "bf16-mixed"

    @property
    def matmul_dtype(self) -> torch.dtype:
        """Dtype of matrix products, and of the logits that generation samples from."""
        return torch.bfloat16 if self.autocast else self.compute_dtype or torch.float32


@dataclass(frozen=True)
class Scoring:
    """The reward models of PPO.

    Args:
        kind: `none` (a function, a service), `adapter` on the policy's base, or a `model`.
        shape: shape of that model; None for the policy's.
        dtype: dtype of its weights; None for the factory's choice under this precision.
        micro_batch_size: rows in one forward; None for all.
        max_length: tokens of a row; None for prompt and response.
        count: number of models or adapters, all alike and all held at once.
        keys: configuration keys of `micro_batch_size`, one for each scorer of a sum.
    """

    kind: Literal["none", "adapter", "model"] = "none"
    shape: Shape | None = None
    dtype: torch.dtype | None = None
    micro_batch_size: int | None = None
    max_length: int | None = None
    count: int = 1
    keys: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Evaluation:
    """Responses that are sampled to evaluate the trained model.

    Args:
        rows: responses sampled at once on each device.
        micro_batch_size: rows in one forward when they are evaluated.
        max_new_tokens: longest response, in tokens.
        during_training: they are also sampled between iterations, while the optimizer's state is
            held.
    """

    rows: int
    micro_batch_size: int | None
    max_new_tokens: int
    during_training: bool = False


@dataclass(frozen=True)
class Run:
    """One stage on one device of `num_devices`.

    Args:
        spec: the stage.
        title: the training in words.
        shape: shape of the policy.
        style: precision, adapters and checkpointing of its models.
        device: kind of device, `cpu` or `cuda`.
        strategy: auto, ddp or fsdp.
        num_devices: processes that train together, one on each device.
        batch_size: rows of an iteration on all devices; pairs for a reward model.
        micro_batch_size: rows (or pairs) in one forward; None for all.
        prompt_length: longest prompt; for SFT and reward model the whole row.
        response_length: longest response of PPO; else 0.
        num_minibatches: optimizer steps of one pass over the rollout.
        num_passes: number of passes over the rollout.
        with_entropy: PPO's loss has an entropy bonus.
        scoring: the reward models of PPO.
        teacher: shape of the teacher; None without one.
        divergence: kind of the loss from the teacher's whole distributions, for which its hidden
            states are kept with the rollout; None without.
        validation_rows: rows of a validation batch on one device; 0 without validation.
        evaluation: evaluation after training; None without one.
        read_at_once: prompt tokens that generation reads in one forward.
        optimizer: parameter groups -> optimizer.
        num_generations: number of rows of a prompt.
        shard_over: devices that share one copy of every model under fsdp; None for all.
        served: other processes sample the responses; the policy's weights are sent to them.
        objective: kind of DPO's loss; KTO's rows are single responses in an update.
    """

    spec: Stage
    title: str
    shape: Shape
    style: Style
    device: Literal["cpu", "cuda"]
    strategy: str
    num_devices: int
    batch_size: int
    micro_batch_size: int | None
    prompt_length: int
    response_length: int
    num_minibatches: int = 1
    num_passes: int = 1
    with_entropy: bool = False
    scoring: Scoring = field(default_factory=Scoring)
    teacher: Shape | None = None
    divergence: str | None = None
    validation_rows: int = 0
    evaluation: Evaluation | None = None
    read_at_once: int = 16_384
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    num_generations: int = 1
    shard_over: int | None = None
    served: bool = False
    objective: str | None = None

    @property
    def sequences_per_row(self) -> int:
        """Sequences of a row that go through a model together in an update."""
        return 1 if self.objective == "kto" else self.spec.sequences_per_row

    @property
    def rows(self) -> int:
        """Rows of an iteration on one device; two for each pair of a reward model."""
        share = -(-self.batch_size // self.num_devices)
        return self.sequences_per_row * share

    @property
    def update_rows(self) -> int:
        """Rows of one optimizer step on one device."""
        return -(-self.rows // self.num_minibatches)

    @property
    def micro_rows(self) -> int:
        """Rows in one forward of an update."""
        most = self.rows_at_once(self.micro_batch_size, self.update_rows, self.length)
        return min(self.sequences_per_row * most, self.update_rows)

    def rows_at_once(self, micro_batch_size: int | None, rows: int, length: int) -> int:
        """Return how many of `rows` rows (or pairs) of `length` tokens go through a model at once.

        Args:
            micro_batch_size: a setting; None takes all on a CPU, and a budget of tokens on a GPU.
            rows: rows that there are.
            length: tokens of the longest.
        """
        if micro_batch_size is None and self.device == "cuda":
            micro_batch_size = max(TOKENS // (self.sequences_per_row * length), 1)
        return min(micro_batch_size or rows, rows)

    @property
    def num_micro_batches(self) -> int:
        """Forwards and backwards that one optimizer step takes on one device."""
        return -(-self.update_rows // self.micro_rows)

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_length + self.response_length

    @property
    def sharded(self) -> int:
        """Devices over which every model is sharded."""
        return (self.shard_over or self.num_devices) if self.strategy == "fsdp" else 1
