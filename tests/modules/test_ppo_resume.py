"""A PPO run that is killed and resumed is, bit for bit, the run that was never killed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rlhf_lightning.callbacks.checkpointing import AtomicCheckpointIO, IterationCheckpoint
from rlhf_lightning.callbacks.exact_resume import RandomState
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.hparams import PPOHparams, SamplingHparams
from tests.builders.library_runs import assert_same_rollouts, assert_same_weights
from tests.builders.models import tiny_tokenizer
from tests.builders.record_files import TEN_PROMPTS
from tests.builders.stages import RecordedPPO, ppo_hparams, tiny_module, trainer

ITERATIONS = 4


class KilledError(RuntimeError):
    pass


class Events(L.Callback):
    """Turn a control after the first iteration, and die at the start of another."""

    def __init__(self, die_at: int | None) -> None:
        self.die_at = die_at

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.die_at:
            raise KilledError

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        if rest[-1] == 0:
            pl_module.controls.learning_rate_factor = 0.5
            pl_module.controls.domain_weights = {"": 0.9}


def run(
    folder: Path,
    *,
    resume: bool = False,
    die_at: int | None = None,
    fingerprint: str = "sft",
    callback: L.Callback | None = None,
    **changes: Any,
) -> tuple[L.Trainer, RecordedPPO, list[torch.Tensor]]:
    torch.manual_seed(99 if resume else 1)
    seen: list[torch.Tensor] = []
    own = {
        name: changes.pop(name) for name in [*changes] if name in PPOHparams.__dataclass_fields__
    }
    hparams = ppo_hparams(num_minibatches=2, kl_target=2.0, kl_horizon=20, **own)
    module = tiny_module(ppo=hparams, fingerprint=fingerprint, **changes)
    data = PromptDataModule(
        GivenRows(TEN_PROMPTS, validation_fraction=0),
        tiny_tokenizer(),
        batch_size=8,
        num_iterations=ITERATIONS,
        max_prompt_length=16,
        seed=5,
    )
    step = module.training_step

    def training_step(prompts: Any, batch_idx: int) -> Any:
        seen.append(prompts.row_ids)
        return step(prompts, batch_idx)

    module.training_step = training_step
    the_trainer = trainer(
        enable_checkpointing=True,
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            IterationCheckpoint(folder, every_n_iterations=2),
            RandomState(),
            Events(die_at),
            *([] if callback is None else [callback]),
        ],
    )
    checkpoint = folder / "last.ckpt" if resume else None
    the_trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return the_trainer, module, seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Any:
    return run(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    with pytest.raises(KilledError):
        run(folder, die_at=3)
    return folder


@pytest.fixture
def killed(killed_once, tmp_path) -> Path:
    return shutil.copytree(killed_once, tmp_path / "killed", symlinks=True)


@pytest.mark.thorough
def test_a_killed_and_resumed_run_is_bitwise_the_run_never_killed(whole, killed):
    whole_trainer, whole_module, whole_seen = whole
    the_trainer, module, seen = run(killed, resume=True)
    assert [rows.tolist() for rows in seen] == [rows.tolist() for rows in whole_seen[2:]]
    assert len(module.rollouts) == ITERATIONS - 2
    assert_same_rollouts(module.rollouts, whole_module.rollouts)
    assert module.steps == whole_module.steps[-len(module.steps) :]
    assert_same_weights(module, whole_module)
    ours, theirs = (t.optimizers[0].state_dict() for t in (the_trainer, whole_trainer))
    assert ours["param_groups"] == theirs["param_groups"]
    for parameter, state in theirs["state"].items():
        for name, value in state.items():
            assert torch.equal(ours["state"][parameter][name], value), (parameter, name)
    assert module.controls == whole_module.controls
    assert module.controls.learning_rate_factor == 0.5
    assert module.controls.kl_coef != module.algorithm.kl_coef
    assert the_trainer.global_step == whole_trainer.global_step == ITERATIONS * 2 * 2
    schedulers = [t.lr_scheduler_configs[0].scheduler for t in (the_trainer, whole_trainer)]
    assert schedulers[0].state_dict() == schedulers[1].state_dict()
    assert_same_weights(module.reference, whole_module.reference)


def test_the_checkpoint_holds_the_controls_and_no_frozen_model(killed):
    checkpoint = torch.load(killed / "last.ckpt", weights_only=False)
    assert set(checkpoint["controls"]) == {
        "kl_coef",
        "temperature",
        "learning_rate_factor",
        "diversity_bonus",
        "domain_weights",
        "asked",
    }
    assert checkpoint["controls"]["domain_weights"] == {"": 0.9}
    assert checkpoint["reference_fingerprint"] == "sft"
    assert {name.split(".")[0] for name in checkpoint["state_dict"]} == {"policy", "value"}


def test_a_run_resumed_against_the_trained_weights_as_reference_is_another(whole, killed):
    # The mutation: without its own source, the reference would be what the checkpoint holds.
    state = torch.load(killed / "last.ckpt", weights_only=False)["state_dict"]

    class Wrong(RecordedPPO):
        def configure_model(self) -> None:
            super().configure_model()
            policy = {k.removeprefix("policy."): v for k, v in state.items() if "policy." in k}
            self.reference.load_state_dict(policy)

    _, module, _ = run(killed, resume=True, cls=Wrong)
    name = "policy.model.transformer.wte.weight"
    assert not torch.equal(module.state_dict()[name], whole[1].state_dict()[name])


def test_a_checkpoint_of_another_reference_is_refused(killed):
    with pytest.raises(ValueError, match=r"trained against reference sft, .* is now other"):
        run(killed, resume=True, fingerprint="other")


def test_a_run_resumed_with_other_settings_gets_them_and_says_so(killed, caplog):
    """What the KL controller made of the others stays, as do the moments of the optimizer."""
    saved = torch.load(killed / "last.ckpt", weights_only=True)
    before = saved["optimizer_states"][0]["param_groups"]
    trainer, module, _ = run(
        killed,
        resume=True,
        learning_rate=3e-3,
        optimizer=lambda groups: torch.optim.AdamW(
            groups, weight_decay=0.25, betas=(0.8, 0.9), eps=1e-5
        ),
        sampling=SamplingHparams(temperature=0.5, max_new_tokens=8),
    )
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    policy, value = trainer.optimizers[0].param_groups
    assert scheduler.base_lrs == [3e-3, before[1]["initial_lr"]]
    assert before[0]["initial_lr"] not in scheduler.base_lrs
    factor = 0.5 * module.schedule.factor(ITERATIONS, ITERATIONS)
    assert policy["lr"] == pytest.approx(3e-3 * factor)
    assert value["lr"] == pytest.approx(before[1]["initial_lr"] * factor)
    assert (policy["weight_decay"], policy["betas"]) == (0.25, (0.8, 0.9))
    assert module.controls.temperature == 0.5
    assert module.controls.learning_rate_factor == saved["controls"]["learning_rate_factor"]
    said = [record.getMessage() for record in caplog.records if "takes the place of" in record.msg]
    assert len(said) == 6  # temperature, one rate, decay and betas of two groups
    assert "module.sampling.temperature=0.5 takes the place of" in said[0]
    assert any(text.startswith("learning_rate of group 1=0.003 takes the place") for text in said)


@pytest.mark.parametrize("kl_coef", [None, 0.7])
def test_a_kl_coef_takes_the_place_of_the_adapted_one_only_where_it_is_another(killed, kl_coef):
    saved = torch.load(killed / "last.ckpt", weights_only=True)["controls"]
    assert saved["kl_coef"] != saved["asked"]["module.ppo.kl_coef"]  # it has been adapted
    first: list[float] = []

    class First(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            first.append(module.controls.kl_coef)

    changed = {} if kl_coef is None else {"kl_coef": kl_coef}
    run(killed, resume=True, callback=First(), **changed)
    assert first == [saved["kl_coef"] if kl_coef is None else 0.7]
