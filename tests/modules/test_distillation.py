"""Distillation on own responses: losses, gradients, runs, and what is told without a reward."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rlhf_lightning import (
    DistillationHparams,
    DistillationModule,
    LoraHparams,
    NoReward,
    PPOModule,
    PromptDataModule,
    SamplingHparams,
    compare,
)
from rlhf_lightning.callbacks.run_tables import describe_rollout, rollout_values
from rlhf_lightning.functional.distillation import DIVERGENCES, vocabulary_divergence
from rlhf_lightning.models import heads
from rlhf_lightning.models.forward import pack, response_statistics
from rlhf_lightning.models.heads import TokenStatistics, hidden_states
from rlhf_lightning.runs.folder import read_metrics
from tests.builders.library_runs import Stop, assert_same_weights, fit_in, rows, samples
from tests.builders.models import flat_gradients, tiny_policy, tiny_tokenizer
from tests.builders.record_files import write_material
from tests.builders.stages import (
    Recorded,
    TokenScorer,
    built,
    counts_of,
    policy_loss_and_gradient,
    rollout_of,
    some_score,
    tiny_distillation,
)

pytestmark = pytest.mark.filterwarnings("ignore::rlhf_lightning.hparams.UnusualHparamWarning")
WIDE = {"hidden_size": 48}


class RecordedDistillation(Recorded, DistillationModule):
    """DistillationModule that can be looked into."""


def hparams(**changes: Any) -> DistillationHparams:
    return DistillationHparams(**({"learning_rate": 3e-3} | changes))


def tiny(model_type: str = "gpt2", **changes: Any) -> Any:
    """A built module, in the llama family with a wider teacher."""
    wider = WIDE if model_type == "llama" else {}
    made = tiny_distillation(
        model_type, distillation=hparams(**changes), cls=RecordedDistillation, teacher=wider
    )
    return built(made)


def taught(module: Any, rollout: Any) -> TokenStatistics:
    temperature, teaching = module.controls.temperature, module.teaching(rollout)
    return response_statistics(module.policy, rollout, temperature=temperature, teaching=teaching)


def logprobs_of(model: Any, rollout: Any) -> torch.Tensor:
    """Log-probabilities `[N, V]` of all tokens at the response positions, at the temperature."""
    packed = pack(rollout)
    hidden = hidden_states(model.model.base_model, packed.input_ids).flatten(0, 1)
    head = model.model.get_output_embeddings()
    return (head(hidden[packed.positions]) / 0.9).log_softmax(-1)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_the_loss_is_the_mean_divergence_over_the_tokens_with_its_gradient(kind, model_type):
    module = tiny(model_type, divergence=kind, teacher_coef=0.5)
    rollout = rollout_of(module)
    loss, gradient, measures = policy_loss_and_gradient(module, rollout)
    with torch.no_grad():
        teacher = logprobs_of(module.teacher.model, rollout)
    module.zero_grad()
    own = logprobs_of(module.policy, rollout)
    wanted = 0.5 * vocabulary_divergence(own, teacher, kind=kind, weight=0.5).mean()
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(gradient, flat_gradients(module.policy), rtol=1e-4, atol=1e-6)
    assert measures["distillation/divergence"] == pytest.approx(2 * loss, rel=1e-5)
    assert measures["distillation/approx_kl"] == measures["distillation/clipfrac"] == 0
    assert not rollout.advantages.any()


def test_under_autocast_gradients_of_chunks_are_added_up_in_float32(monkeypatch):
    module = tiny("llama")
    rollout = rollout_of(module)
    head = module.policy.model.get_output_embeddings().weight

    def gradient(chunk_rows: int) -> torch.Tensor:
        monkeypatch.setattr(heads, "rows_of_chunk", lambda *_, **__: chunk_rows)
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            taught(module, rollout).divergence.sum().backward()
        return head.grad.clone()

    exact, chunks = gradient(10_000), gradient(1)
    # A sum that was made in bf16 would be a number of bf16.
    assert not torch.equal(chunks, chunks.bfloat16().float())
    assert (chunks - exact).norm() < 4e-3 * exact.norm()


def test_log_probabilities_of_the_loss_are_those_of_the_rollout_to_the_bit():
    module = tiny("llama", divergence="forward")
    rollout = rollout_of(module)
    assert torch.equal(taught(module, rollout).logprobs, rollout.logprobs)
    assert torch.equal(rollout.logprobs, rollout.ref_logprobs)


def test_a_reward_is_added_to_either_form():
    scorer = TokenScorer(some_score)
    for divergence in ("sampled", "reverse"):
        module = tiny(divergence=divergence)
        alone = rollout_of(module)
        module.scorer = scorer
        both = rollout_of(module)
        gain = both.advantages - alone.advantages
        expected = both.scores.unsqueeze(-1).expand_as(gain)
        on = both.response_mask
        torch.testing.assert_close(gain[on], expected[on], rtol=0, atol=1e-5)
        if divergence == "sampled":
            gap = module.algorithm.teacher_coef * (alone.teacher_logprobs - alone.logprobs)
            torch.testing.assert_close(alone.advantages[on], gap[on], rtol=0, atol=1e-5)
        assert both.has_reward
        assert not alone.has_reward


def test_without_a_reward_no_score_is_told():
    module = tiny()
    rollout = rollout_of(module)
    assert rollout.known_scores.isnan().all()
    assert rollout.scored.all()
    samples = describe_rollout(rollout, module.tokenizer, 2)
    assert [row["score"] for row in samples] == [None, None]
    assert torch.tensor(rollout_values(rollout)["score"]).isnan().all()
    rows = replace(rollout[:4], has_reward=True).known_scores
    assert rows.tolist() == [0.0] * 4


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = write_material(tmp_path_factory.mktemp("material"))
    folder = found["policy"].parent / "teacher"
    teacher = tiny_policy("llama", seed=7, max_position_embeddings=2048, **WIDE)
    teacher.model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return found | {"teacher": folder}


def made(material: dict[str, Path], **changes: Any) -> Any:
    given = {
        "teacher": material["teacher"],
        "distillation": hparams(num_minibatches=2, micro_batch_size=3),
        "sampling": SamplingHparams(max_new_tokens=5),
    }
    return RecordedDistillation.from_pretrained(material["policy"], **given | changes)


def train(
    material: dict[str, Path],
    folder: Path,
    ckpt_path: str | None = None,
    callbacks: Any = None,
    **changes: Any,
) -> tuple[Any, L.Trainer]:
    module = made(material, **changes)
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=12)
    flags = {"checkpoint_every_n_iterations": 1, "callbacks": callbacks, "doctor": True}
    return module, fit_in(folder, module, data, ckpt_path=ckpt_path, **flags)


VARIANTS = {
    "reverse": {},
    "sampled": {"distillation": hparams(divergence="sampled", num_minibatches=2)},
    "lora": {"lora": LoraHparams(r=4)},
    "lag": {
        "distillation": hparams(rollout_lag=1, off_policy="truncated", divergence="forward"),
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def trained(material, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return (*train(material, folder, **VARIANTS[request.param]), folder, VARIANTS[request.param])


@pytest.mark.thorough
def test_a_run_comes_closer_and_says_nothing_of_scores(trained):
    module, _, folder, _ = trained
    table = rows(folder)
    assert all(row["rollout/teacher_kl_per_token"] for row in table)
    if module.learns_distributions:
        divergence = [row["distillation/divergence"] for row in table]
        assert divergence[-1] < divergence[0]
    names = {name for row in table for name in row}
    assert not [name for name in names if "score" in name]
    assert ("distillation/divergence" in names) == module.learns_distributions
    assert {name.split(".")[0] for name in module.state_dict()} == {"policy"}
    log = [json.loads(line) for line in (folder / "doctor.jsonl").read_text().splitlines()]
    told = [row for row in log if row["name"] == "constant_score"]
    assert [(row["kind"], row["message"]) for row in told] == [("idle", "no reward")]


@pytest.mark.thorough
def test_a_killed_and_resumed_run_is_bitwise_the_run_never_killed(material, trained, tmp_path):
    whole, _, folder, variant = trained
    with pytest.raises(RuntimeError, match="the power went"):
        train(material, tmp_path, callbacks=Stop(), **variant)
    module, _ = train(material, tmp_path, "last", **variant)
    assert rows(tmp_path) == rows(folder)
    assert samples(tmp_path) == samples(folder)
    assert_same_weights(module, whole)


@pytest.mark.parametrize("trained", ["reverse", "lora"], indirect=True)
def test_it_is_read_from_its_checkpoint_without_a_reward_and_compared(material, trained):
    module, _, folder, _ = trained
    read = DistillationModule.load_from_checkpoint(folder / "checkpoints/last.ckpt")
    assert isinstance(read.scorer, NoReward)
    assert read.teacher is not None
    assert_same_weights(read, module)
    how = {"num_prompts": 6, "batch_size": 6, "max_new_tokens": 5}
    held_out = PromptDataModule(material["prompts"], read.tokenizer, batch_size=12)
    found = compare(module, material["policy"], held_out, gold=gold, **how)
    metrics = found.metrics
    start = metrics["val/baseline_teacher_kl_per_token"]
    share = metrics["val/teacher_kl_per_token"] / start
    assert metrics["val/teacher_kl_share"] == pytest.approx(share)
    assert "val/score_win_rate" not in metrics
    with pytest.raises(TypeError, match="compare needs reward="):
        compare(module, material["policy"], held_out, **how)


def gold(prompts: list[str], completions: list[str], finished: list[bool]) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_teacher_is_needed(material):
    with pytest.raises(ValueError, match=r"RecordedDistillation learns from a teacher.*teacher=FO"):
        RecordedDistillation.from_pretrained(material["policy"])


def test_ppo_learns_from_a_teacher_alone_too(material, tmp_path):
    module = PPOModule.from_pretrained(
        material["policy"],
        NoReward(),
        teacher=material["teacher"],
        sampling=SamplingHparams(max_new_tokens=5),
    )
    assert module.hparams["reward"] is False
    data = PromptDataModule(material["prompts"], module.tokenizer, batch_size=12)
    fit_in(tmp_path, module, data, max_iterations=2)
    assert "rollout/score" not in read_metrics(tmp_path / "metrics.csv")[0]
    read = PPOModule.load_from_checkpoint(tmp_path / "checkpoints/last.ckpt")
    assert isinstance(read.scorer, NoReward)


def test_a_divergence_is_over_the_responses_without_a_score_too():
    module = tiny(divergence="reverse")
    rollout = rollout_of(module)
    half = replace(rollout, scored=torch.arange(len(rollout)) % 2 == 0)
    assert torch.equal(half.loss_mask, rollout.response_mask)
    (loss, measured), (every, _) = (module.policy_loss(r, counts_of(r)) for r in (half, rollout))
    assert float(loss) == pytest.approx(float(every), rel=1e-5)
    assert float(measured["distillation/divergence"]) == pytest.approx(float(loss), rel=1e-5)
