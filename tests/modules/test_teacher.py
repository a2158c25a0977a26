"""A teacher beside PPO and GRPO: what it gives, and that nothing else of it is left anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rlhf_lightning import (
    DistillationHparams,
    DistillationModule,
    FunctionScorer,
    GRPOHparams,
    LoraHparams,
    PPOHparams,
    PPOModule,
    PromptDataModule,
    SamplingHparams,
    compare,
    trainer_arguments,
)
from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.callbacks.doctor.callback import knobs_of
from rlhf_lightning.models.factory import frozen
from rlhf_lightning.models.forward import response_statistics
from rlhf_lightning.models.ppo_models import PolicyModels
from tests.builders.library_runs import Stop, assert_same_weights, fit_in, rows, samples
from tests.builders.models import flat_gradients, flat_parameters, tiny_policy, tiny_tokenizer
from tests.builders.record_files import write_material
from tests.builders.reward_server import serving
from tests.builders.stages import (
    built,
    counts_of,
    fit,
    group_prompts,
    grpo_hparams,
    ppo_hparams,
    prompts,
    rollout_of,
    tiny_grpo,
    tiny_models,
    tiny_module,
)
from tests.builders.teacher_server import vllm_of
from tests.modules.test_grpo_runs import made
from tests.modules.test_grpo_runs import prompts as prompt_data

GRPO = GRPOHparams(learning_rate=1e-3, num_minibatches=2, teacher_coef=0.5)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = write_material(tmp_path_factory.mktemp("material"))
    for seed in (7, 8):
        folder = found["policy"].parent / f"teacher_{seed}"
        tiny_policy("llama", seed=seed, max_position_embeddings=2048).model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        found[folder.name] = folder
    return found


def taught(coef: float | None, **changes: Any) -> Any:
    """A GRPO module; without a coefficient it has no teacher."""
    weighed = {} if coef is None else {"teacher_coef": coef}
    module = tiny_grpo(
        grpo=grpo_hparams(**weighed, **changes),
        models=lambda: PolicyModels(
            policy=tiny_policy(),
            reference=frozen(tiny_policy()),
            teacher=None if coef is None else frozen(tiny_policy(seed=7)),
        ),
    )
    return built(module)


@pytest.mark.parametrize("scale", ["group_std", "global_std"])
def test_the_teacher_adds_its_log_ratio_to_the_advantages_at_the_temperature_of_the_rollout(scale):
    prompts = group_prompts()
    plain, module = taught(None, scale=scale), taught(0.3, scale=scale)
    without, rollout = rollout_of(plain, prompts), rollout_of(module, prompts)
    teacher = frozen(tiny_policy(seed=7))
    expected = response_statistics(teacher, rollout, temperature=0.9).logprobs
    torch.testing.assert_close(rollout.teacher_logprobs, expected, rtol=0, atol=1e-6)
    assert not rollout.teacher_logprobs[~rollout.response_mask].any()
    gap = rollout.teacher_logprobs - rollout.logprobs
    assert gap.abs().max() > 0.5
    torch.testing.assert_close(
        rollout.advantages, without.advantages + 0.3 * gap, rtol=0, atol=1e-6
    )
    for name in ("sequences", "logprobs", "ref_logprobs", "rewards", "scores"):
        assert torch.equal(getattr(rollout, name), getattr(without, name)), name
    assert without.teacher_logprobs is None


def none_of_the_odd(prompts: Any, completions: Any) -> list[float | None]:
    return [None if row % 2 else float(len(text)) for row, text in enumerate(completions)]


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_it_teaches_about_responses_to_which_the_reward_does_not_apply(kind):
    def rollout_with(coef: float | None) -> tuple[Any, RolloutBatch]:
        make, batch = (taught, group_prompts()) if kind == "grpo" else (taught_ppo, prompts())
        module = make(coef)
        module.scorer = FunctionScorer(none_of_the_odd)
        return module, rollout_of(module, batch)

    (_, without), (module, rollout) = rollout_with(None), rollout_with(0.3)
    unscored = ~rollout.scored
    assert 0 < unscored.sum() < len(unscored)
    gap = rollout.teacher_logprobs - rollout.logprobs
    expected = without.advantages + 0.3 * gap
    torch.testing.assert_close(rollout.advantages, expected, rtol=0, atol=1e-6)
    assert rollout.advantages[unscored].any(1).all()
    assert not without.loss_mask[unscored].any()
    # The loss is over all of them; what the value model learns, over those with a score.
    module.policy_loss(rollout[unscored], counts_of(rollout))[0].backward()
    assert flat_gradients(module.policy).abs().max() > 1e-3
    if kind == "ppo":
        assert module.value_loss(rollout, counts_of(rollout))[0] > 0
        assert module.value_loss(rollout[unscored], counts_of(rollout))[0] == 0
    _, measured = rollout_with(0.0)
    assert torch.equal(measured.loss_mask, without.loss_mask)


def test_the_value_loss_is_the_mean_over_the_scored_responses_alone():
    module = taught_ppo(0.3)
    module.scorer = FunctionScorer(none_of_the_odd)
    fit(module, [prompts()])
    minibatch, mask = module.minibatches[0], module.minibatches[0].reward_mask
    assert 0 < mask.sum() < minibatch.loss_mask.sum()
    errors = (minibatch.values - minibatch.returns)[mask]  # before any step
    found = module.steps[0]["ppo/value_loss"]
    assert float(found) == pytest.approx(float(errors.square().mean() / 2), rel=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_where_no_response_has_a_score_it_teaches_alone(kind):
    module = taught_ppo(1.0) if kind == "ppo" else taught(1.0, num_minibatches=2)
    module.scorer = FunctionScorer(lambda prompts, completions: [None] * len(completions))
    before = flat_parameters(module.policy).clone()
    fit(module, [prompts() if kind == "ppo" else group_prompts()])
    assert module.num_optimizer_steps == len(module.steps) > 1
    assert not torch.equal(flat_parameters(module.policy), before)
    if kind == "ppo":
        assert {step["ppo/value_loss"] for step in module.steps} == {0.0}


def test_a_coefficient_of_0_measures_the_distance_and_changes_no_bit():
    without, rollout = (rollout_of(taught(coef), group_prompts()) for coef in (None, 0.0))
    assert torch.equal(rollout.advantages, without.advantages)
    assert rollout.teacher_logprobs is not None


def taught_ppo(coef: float | None) -> Any:
    """A PPO module; without a coefficient it has no teacher."""

    def models() -> Any:
        teacher = None if coef is None else frozen(tiny_policy(seed=7))
        return type(tiny_models())(**vars(tiny_models()) | {"teacher": teacher})

    weighed = {} if coef is None else {"teacher_coef": coef}
    return built(tiny_module(models=models, ppo=ppo_hparams(**weighed)))


def train(
    material: dict[str, Path],
    folder: Path,
    ckpt_path: str | None = None,
    callbacks: Any = None,
    **changes: Any,
) -> tuple[Any, L.Trainer]:
    module = made(material, **{"grpo": GRPO, "teacher": material["teacher_7"]} | changes)
    flags = {"checkpoint_every_n_iterations": 1, "callbacks": callbacks}
    data = prompt_data(material, module)
    return module, fit_in(folder, module, data, ckpt_path=ckpt_path, **flags)


@pytest.fixture(scope="module", params=[None, LoraHparams(r=4)], ids=["whole", "lora"])
def trained(material, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return (*train(material, folder, lora=request.param), folder, request.param)


@pytest.mark.thorough
def test_the_policy_comes_closer_and_the_teacher_stays_out_of_what_is_trained_and_saved(trained):
    module, trainer, folder, _ = trained
    assert {name.split(".")[0] for name in module.state_dict()} == {"policy"}
    assert not any(p.requires_grad or p.grad is not None for p in module.teacher.model.parameters())
    assert module.teacher.model in module.frozen_models
    (group,) = trainer.optimizers[0].param_groups
    assert not {id(p) for p in module.teacher.model.parameters()} & {id(p) for p in group["params"]}
    first, *_, last = (row["rollout/teacher_kl_per_token"] for row in rows(folder))
    assert first == pytest.approx(
        float(
            (module.rollouts[0].logprobs - module.rollouts[0].teacher_logprobs).sum()
            / module.rollouts[0].response_mask.sum()
        ),
        rel=1e-5,
    )
    assert last < first
    saved = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    assert saved["teacher"] == {"fingerprint": module.more_sources[0].fingerprint}
    assert saved["hyper_parameters"]["teacher"] == module.more_sources[0].name


@pytest.mark.thorough
def test_a_killed_and_resumed_run_is_bitwise_the_run_never_killed(material, trained, tmp_path):
    whole, _, folder, lora = trained
    with pytest.raises(RuntimeError, match="the power went"):
        train(material, tmp_path, lora=lora, callbacks=Stop())
    module, _ = train(material, tmp_path, "last", lora=lora)
    assert rows(tmp_path) == rows(folder)
    assert samples(tmp_path) == samples(folder)
    assert_same_weights(module, whole)


@pytest.mark.parametrize("trained", [None], indirect=True)
def test_a_checkpoint_is_read_with_its_teacher_and_resumed_with_no_other(
    material, trained, tmp_path
):
    whole, _, folder, lora = trained
    checkpoint = str(folder / "checkpoints/last.ckpt")
    read = type(whole).load_from_checkpoint(checkpoint, reward=whole.scorer)
    assert read.more_sources == whole.more_sources
    assert read.teacher is not None
    with pytest.raises(ValueError, match=r"trained with teacher \w{12}, and teacher=.*teacher_8"):
        train(material, tmp_path, checkpoint, lora=lora, teacher=material["teacher_8"])


def test_another_tokenizer_and_settings_without_a_teacher_are_refused(material, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(material["teacher_7"], other)
    file = other / "tokenizer.json"
    text = json.loads(file.read_text())
    words = text["model"]["vocab"]
    words["w3"], words["w4"] = words["w4"], words["w3"]
    file.write_text(json.dumps(text))
    with pytest.raises(ValueError, match=r"teacher='.*other': .* has another tokenizer"):
        made(material, teacher=other)
    with pytest.raises(ValueError, match=r"teacher_coef is given, and RecordedGRPO"):
        made(material, grpo=GRPO)
    with pytest.raises(ValueError, match="teacher_prompt is given, and RecordedGRPO has no"):
        made(material, teacher_prompt="{prompt}")
    with pytest.raises(ValueError, match="teacher_coef is given, and PPOModule"):
        PPOModule.from_pretrained(
            material["policy"], lambda completions: [0.0], ppo=PPOHparams(teacher_coef=2)
        )


HINTED = DistillationHparams(learning_rate=3e-3, num_minibatches=2)


def distilled(
    material: dict[str, Path],
    folder: Path,
    ckpt_path: str | None = None,
    *,
    iterations: int = 24,
    **changes: Any,
) -> tuple[Any, L.Trainer]:
    """Train the policy on what it would write if it were told a hint; return the module."""
    hinted = folder.parent / "hinted.jsonl"
    texts = [json.loads(line)["prompt"] for line in material["prompts"].read_text().splitlines()]
    told = [{"prompt": text, "hint": "w40 w41 w42"} for text in texts]
    hinted.write_text("".join(json.dumps(row) + "\n" for row in told))
    module = DistillationModule.from_pretrained(
        material["policy"],
        distillation=HINTED,
        sampling=SamplingHparams(max_new_tokens=5),
        teacher=material["policy"],
        **{"teacher_prompt": "{prompt} {hint}"} | changes,
    )
    data = PromptDataModule(hinted, module.tokenizer, batch_size=16, num_iterations=iterations)
    callbacks = [Stop()] if folder.name == "killed" and ckpt_path is None else []
    flags = {"max_iterations": iterations, "callbacks": callbacks}
    trainer = fit_in(
        folder, module, data, ckpt_path=ckpt_path, checkpoint_every_n_iterations=1, **flags
    )
    return module, trainer


@pytest.mark.thorough
def test_a_policy_learns_from_itself_what_it_would_write_if_it_were_told_more(material, tmp_path):
    module, _ = distilled(material, tmp_path / "told")
    found = rows(tmp_path / "told")
    assert found[0]["rollout/kl_per_response"] == 0  # the teacher is the start, and still differs
    divergence = [row["distillation/divergence"] for row in found]
    assert sum(divergence[-6:]) / 6 < 0.7 * sum(divergence[:3]) / 3
    plain, _ = distilled(material, tmp_path / "plain", teacher_prompt=None, iterations=1)
    assert rows(tmp_path / "plain")[0]["rollout/teacher_kl_per_token"] == 0
    start, prompts = module.hparams["policy"], tmp_path / "hinted.jsonl"
    compared = compare(module, start, prompts, gold=words, answers_per_prompt=64)
    assert compared.metrics["val/teacher_kl_share"] < 0.95
    same = compare(plain, start, prompts, gold=words)
    assert "val/teacher_kl_share" not in same.metrics  # it was 0 at the start


@pytest.mark.thorough
def test_a_killed_run_whose_teacher_reads_other_prompts_goes_on_to_the_same_bits(
    material, tmp_path
):
    whole, _ = distilled(material, tmp_path / "whole", iterations=4)
    with pytest.raises(RuntimeError, match="the power went"):
        distilled(material, tmp_path / "killed", iterations=4)
    again, _ = distilled(material, tmp_path / "killed", "last", iterations=4)
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert_same_weights(again, whole)
    checkpoint = tmp_path / "killed/checkpoints/last.ckpt"
    assert DistillationModule.load_from_checkpoint(checkpoint).teacher_prompt.fields == (
        "prompt",
        "hint",
    )


def words(prompts: Any, completions: Any, finished: Any) -> list[float]:
    return [float(len(text.split())) for text in completions]


def test_the_doctor_leaves_the_temperature_of_a_server_alone(material):
    settings = DistillationHparams(divergence="sampled")
    teacher = tiny_policy("llama", seed=7, max_position_embeddings=2048).model
    with serving(vllm_of(teacher, tiny_tokenizer())) as server:
        url = server.url.removesuffix("/score")
        for place in (url, material["teacher_7"]):
            module = DistillationModule.from_pretrained(
                material["policy"], teacher=place, distillation=settings
            )
            assert module.hparams["teacher"] == str(place)
            assert knobs_of(module).keeps_temperature == (place == url)


def test_prompts_that_a_teacher_cannot_read_are_named_before_the_first_rollout(material, tmp_path):
    texts = [json.loads(line)["prompt"] for line in material["prompts"].read_text().splitlines()]
    told = [{"prompt": text, "hint": "w4" if i != 7 else ""} for i, text in enumerate(texts)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    given = {"teacher": material["policy"], "teacher_prompt": "{prompt} {hint}"}
    module = DistillationModule.from_pretrained(material["policy"], **given)
    trainer = L.Trainer(**trainer_arguments(tmp_path / "run", max_iterations=1, accelerator="cpu"))
    for cut, problem in (
        ({}, r"prompt \d+ has no hint"),
        ({"over_long": "truncate_left"}, "over_long=truncate_left cuts those of the policy"),
    ):
        data = PromptDataModule(tmp_path / "some.jsonl", module.tokenizer, batch_size=4, **cut)
        with pytest.raises(ValueError, match=problem):
            trainer.fit(module, data)
    assert not (tmp_path / "run/metrics.csv").exists()


def test_a_comparison_on_other_prompts_leaves_the_teacher_out(material, tmp_path, caplog):
    module, _ = distilled(material, tmp_path / "run", iterations=1)
    found = compare(module, module.hparams["policy"], material["prompts"], gold=words)
    assert "val/teacher_kl_per_token" not in found.metrics
    assert "the KL to the teacher is not measured: teacher_prompt=" in caplog.text


def test_a_teacher_that_lacks_ids_of_the_policy_is_refused_before_anything_is_sampled():
    def tables(policy: int, teacher: int) -> PolicyModels:
        models = [tiny_policy("llama", vocab_size=size) for size in (policy, policy, teacher)]
        return PolicyModels(policy=models[0], reference=models[1], teacher=models[2])

    with pytest.raises(ValueError, match=r"^teacher: its logits have 48 columns and .* 112"):
        tables(112, 48)
    assert tables(48, 112).teacher is not None
