"""It composes: every experiment, preset, scorer, judge and recipe of `conf/`, in one table."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.app.config.compose import choices
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.hparams import UnusualHparamWarning
from tests.builders.command_lines import named_model, settings_of

SCORERS = {
    "function": "scorer.function=f.py:g",
    "http": "scorer.url=http://x/y",
    "text_reward_model": "scorer.source=org/name",
    "reward_ensemble": "scorer.sources=[org/one,org/two]",
    "weighted": "scorer.scorers={a:{_target_:rlhf_lightning.FunctionScorer,function:f.py:g}}",
}


def recipe(words: str) -> str:
    """Return the words of a stage of a pretrained model: `ppo llama3_1_8b lora=lora`."""
    stage, model, *more = words.split()
    data = "ultrachat" if stage == "sft" else "ultrafeedback"
    own = [] if any(word.startswith("dataset=") for word in more) else [f"dataset={data}"]
    return " ".join([f"+experiment={stage}", f"model={model}", *own, *more])


def sharded(batch: int) -> dict[str, Any]:
    return {"data.batch_size": batch, "trainer.devices": 8, "trainer.precision": "32-true"}


def one_gpu(batch: int) -> dict[str, Any]:
    return {"data.batch_size": batch, "trainer.devices": 1, "trainer.precision": "bf16-mixed"}


# A command line, and values that it gives.
ROWS: list[tuple[str, dict[str, Any]]] = [
    *((f"+experiment={name}", {}) for name in choices("experiment")),
    *(
        (f"+experiment=ppo scorer={name} {SCORERS.get(name, '')}", {})
        for name in choices("scorer")
        if name not in ("none", "reward_adapter")
    ),
    # Policies with a right answer are judged by their likeliest one.
    *(
        (f"+experiment={name} dataset.path=x", {"evaluation.temperature": 0.0})
        for name in ("sft_smollm2_shell", "sft_smollm2_gsm8k")
    ),
    # The length that is given takes the place of the other one.
    ("+experiment=dpo data.num_iterations=3", {"data.num_epochs": None}),
    (
        "+experiment=sft_smollm2_shell dataset.path=x data.num_epochs=2",
        {"data.num_iterations": None},
    ),
    (recipe("sft smollm2_135m"), one_gpu(128) | {"module.sft.micro_batch_size": 16}),
    (recipe("sft qwen2_5_7b strategy=fsdp"), sharded(128)),
    (
        recipe("reward smollm2_135m lora=lora"),
        {"artifacts.sft": "artifacts/smollm2_135m_lora/ultra/sft"},
    ),
    (recipe("ppo qwen2_5_0_5b"), one_gpu(128) | {"module.ppo.micro_batch_size": None}),
    (
        recipe("ppo qwen2_5_0_5b lora=qlora"),
        {"artifacts.sft": "artifacts/qwen2_5_0_5b_lora/ultra/sft"},
    ),
    (recipe("ppo llama3_2_1b strategy=fsdp"), sharded(256)),
    (recipe("ppo smollm2_360m dataset=tldr"), {"evaluation.max_new_tokens": 64}),
    (
        "+experiment=sft model=pretrained dataset=files dataset.path=a.jsonl dataset.name=mine",
        {"artifacts.publish": "artifacts/pretrained/mine/sft", "evaluation.max_new_tokens": 512},
    ),
]


def composed(words: str) -> TrainSettings:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found: TrainSettings = settings_of(*words.split())
    return found


@pytest.mark.parametrize(("words", "gives"), ROWS, ids=[words for words, _ in ROWS])
def test_a_command_line_composes_and_gives(words, gives):
    settings = composed(words)
    settings.check_targets()
    assert type(settings.hparams) is settings.spec.kinds[settings.stage]
    assert settings.artifacts.publish, "a stage that publishes nothing cannot be built upon"
    assert {key: settings.select(key) for key in gives} == gives
    check_batches(settings)


def check_batches(settings: TrainSettings) -> None:
    """A batch divides into ranks and minibatches, and rows fit the context."""
    assert settings.data.batch_size % settings.batch_unit == 0
    if settings.model.shape is None or not settings.spec.rolls_out:
        return
    context = settings.model.shape.get("max_position_embeddings", 2048)
    prompt = settings.data.get("max_prompt_length")
    assert prompt + settings.all_hparams["sampling"].max_new_tokens <= context


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["", "lora=lora"])
def test_the_stages_of_a_recipe_build_on_each_other(variant):
    cfgs = {s: composed(recipe(f"{s} qwen3_0_6b {variant}")) for s in ("sft", "reward", "ppo")}
    sft, reward, ppo = (cfg.artifacts for cfg in cfgs.values())
    assert sft.base == cfgs["sft"].model.source
    assert reward.sft == ppo.sft == sft.publish
    assert ppo.reward == reward.publish
    assert ("_lora/" in sft.publish) == (variant == "lora=lora"), "adapters overwrite no full model"
    kind = "RewardAdapterScorer" if variant == "lora=lora" else "RewardModelScorer"
    assert cfgs["ppo"].scorer.class_name == kind


def test_sft_on_the_preference_set_replaces_no_model_of_the_other_set():
    words = "sft smollm2_135m dataset="
    names = ("ultrachat", "ultrafeedback", "hh_rlhf")
    assert len({composed(recipe(words + name)).artifacts.publish for name in names}) == 3


def test_every_shape_has_the_parameters_that_its_file_states():
    sizes = set(choices("model")) - {"demo", "pretrained"}
    assert len(sizes) >= 7
    for model in sizes:
        file = named_model(model)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**file["shape"]))
        assert sum(p.numel() for p in built.parameters()) == file["num_parameters"], model


@pytest.mark.parametrize("preset", ["article_step_by_step", "article_dynamics"])
def test_presets_set_the_articles_values_and_warn_of_what_is_unusual(preset):
    with pytest.warns(UnusualHparamWarning, match=r"gamma=0\.99"):
        ppo = settings_of("+experiment=ppo", f"+preset={preset}").hparams
    assert (ppo.gamma, ppo.vf_coef, ppo.gae_lambda, ppo.num_ppo_epochs) == (0.99, 0.5, 0.95, 4)


@pytest.mark.parametrize(("entry", "name"), [("evaluate", "local"), ("collect", "openai")])
def test_every_judge_is_built_with_further_keys_and_nulls(entry, name, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    words = [f"judge={name}", "judge.model=m", "judge.system=null", "judge.temperature=null"]
    words += ["judge.extra={chat_template_kwargs: {enable_thinking: false}}"]
    words += ["judge.input_price=1", "judge.output_price=1"] if name == "openai" else []
    judge = settings_of(*words, entry=entry).judge.build()
    assert judge.extra == {"chat_template_kwargs": {"enable_thinking": False}}
    assert judge.hparams.temperature is None


@pytest.mark.thorough
def test_what_is_read_from_the_environment_counts_in_the_hash_but_for_secrets(monkeypatch):
    def digest(path: str, *more: str) -> str:
        own = ("dataset=files", "dataset.name=mine", f"dataset.path='{path}'")
        found: str = settings_of("+experiment=sft", *own, *more).config_hash
        return found

    for name, value in {"DATA": "/a", "JUDGE_API_KEY": "secret", "HERE": "/a"}.items():
        monkeypatch.setenv(name, value)
    first = digest("${oc.env:DATA}/d")
    assert first == digest("${oc.env:HERE}/d") == digest("/a/d")
    assert first == digest("${oc.env:NOT_SET,${oc.env:DATA}}/d") == digest("${oc.env:DATA,/b}/d")
    keyed = digest("${oc.env:JUDGE_API_KEY}")
    monkeypatch.setenv("SLURM_TMPDIR", "/scratch/job.1")
    staged = digest("${oc.env:SLURM_TMPDIR}/d")
    placed = digest("mine", "paths.outputs=${oc.env:DATA}/outputs")
    monkeypatch.setenv("DATA", "/b")
    monkeypatch.setenv("JUDGE_API_KEY", "renewed")
    monkeypatch.setenv("SLURM_TMPDIR", "/scratch/job.2")
    assert digest("${oc.env:SLURM_TMPDIR}/d") == staged  # the next job of the same run
    assert digest("${oc.env:DATA}/d") == digest("/b/d") != first
    assert digest("${oc.env:JUDGE_API_KEY}") == keyed
    assert digest("mine", "paths.outputs=${oc.env:DATA}/outputs") == placed == digest("mine")


def test_another_seed_holds_out_the_same_prompts_as_the_stages_before():
    # Artefacts of these data sets do not have the seed in their path, so a run with another seed
    # starts from models that were trained with the first one's split.
    for chosen in ("dataset=files dataset.path=x", "dataset=hub dataset.hub_name=x"):
        words = ["+experiment=ppo", *chosen.split(), "dataset.name=mine"]
        seeds = [settings_of(*words, f"seed={n}").dataset.source.get("seed") for n in (1, 2)]
        assert seeds[0] is not None
        assert seeds[0] == seeds[1]


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["reward", "ppo"])
def test_gates_and_refusals_are_those_of_the_data_set(stage):
    built_in = settings_of(f"+experiment={stage}")
    assert built_in.gates
    assert (built_in.safety is None) == (stage == "reward")
    own = ["model=smollm2_135m", "dataset=tldr"]
    other = settings_of(f"+experiment={stage}", *own)
    assert not other.gates
    assert other.safety is None
    none = settings_of(f"+experiment={stage}", "gates=none", "safety=none")
    assert not none.gates
    assert none.safety is None


@pytest.fixture(scope="module")
def ppo() -> TrainSettings:
    return settings_of("+experiment=ppo")


# Title, baseline, scale, surrogate, reduction, place of the KL: what each paper has.
PUBLISHED = {
    "grpo": ("GRPO", "mean", "group_std", "ppo", "token", "loss"),
    "rloo": ("RLOO", "leave_one_out", "none", "ppo", "constant", "reward"),
    "dr_grpo": ("Dr. GRPO", "mean", "none", "ppo", "constant", "loss"),
    "reinforce_pp": ("REINFORCE++", "none", "global_std", "ppo", "token", "reward"),
    "gspo": ("GSPO", "mean", "group_std", "gspo", "sequence", "loss"),
    "cispo": ("CISPO", "mean", "group_std", "cispo", "token", "loss"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("experiment", PUBLISHED)
def test_an_experiment_composes_without_a_warning_into_what_it_is_called(experiment, ppo):
    settings = composed(f"+experiment={experiment}")
    own = settings.hparams
    found = (own.baseline, own.scale, own.surrogate, own.loss_reduction, own.kl_in)
    assert (settings.title, *found) == PUBLISHED[experiment]
    assert settings.stage == "grpo"
    assert settings.name.endswith(experiment) or experiment == "grpo"
    assert settings.data.num_generations == (1 if experiment == "reinforce_pp" else 8)
    assert settings.data.num_rows == ppo.data.num_rows, "as many responses as PPO's, to compare"
    assert settings.artifacts.publish != ppo.artifacts.publish
