"""Does the doctor notice what goes wrong in PPO of a real model, and is it quiet otherwise?

    export RLHF_DATA=FOLDER DOCTOR_PAIRS=pairs SMOLLM2=FOLDER
    python -m benchmarks.studies.doctor.pairs $DOCTOR_PAIRS     # the wrong labels
    python -m benchmarks.studies.doctor.run --jobs 2
    python -m benchmarks.studies.doctor.table outputs/studies/doctor

SmolLM2-135M with LoRA: healthy runs on film reviews, shell commands and harmless responses, and
runs whose reward or settings are wrong. RLHF_DATA has `sentence_polarity`, `tldr_pages`,
`hh_harmless` and `prompts`. The doctor has its shipped thresholds.
"""

from __future__ import annotations

from benchmarks.studies.run import Row, Study, env, main

DATA, PAIRS, SMOLLM2 = env("RLHF_DATA"), env("DOCTOR_PAIRS"), env("SMOLLM2")
REVIEWS = [
    f"dataset.positive={DATA}/sentence_polarity/pos.txt",
    f"dataset.negative={DATA}/sentence_polarity/neg.txt",
]
PAGES = f"dataset.path={DATA}/tldr_pages/examples.jsonl.gz"
LORA = ["model=pretrained", "lora=lora"]
HARMLESS = [
    "dataset=files",
    "dataset.name=harmless",
    "dataset.source.on_bad_record=skip",
    f"dataset.path={PAIRS}/harmless.jsonl",
    *LORA,
    f"artifacts.sft={SMOLLM2}",
]
ONCE = ["logger=none", "gates=none", "data.num_epochs=null", "trainer.validations=1"]
UNSAVED = "callbacks.checkpoint.every_n_iterations=100"
SHORT = [
    "data.num_iterations=12",
    "callbacks.checkpoint.every_n_iterations=12",
    "evaluation.every_n_iterations=4",
    "evaluation.num_prompts=32",
]
SECOND = (
    "doctor.second_scorer={_target_: rlhf_lightning.FunctionScorer, "
    "function: benchmarks.studies.doctor.rewards.bag_of_words}"
)
TOKENS = "module.sampling.max_new_tokens=24"
STARTS = {"sft": "sft_reviews", "reward": "reward_reviews"}
COMMANDS = [
    "dataset=shell_commands",
    PAGES,
    *LORA,
    "scorer=function",
    "scorer.function=rlhf_lightning.rollout.scorers.verifiable.command_reward",
    "artifacts.reward=null",
    "module.sampling.max_new_tokens=16",
    "data.max_prompt_length=48",
    "+preset=doctor_grpo",
]
OF_REWARD_MODEL = (
    "doctor.second_scorer={_target_: rlhf_lightning.RewardModelScorer, load: "
    "{_target_: rlhf_lightning.load_scalar_model, _partial_: true, source: ${artifacts.reward}, "
    "precision: 32-true}, policy: ${artifacts.sft}, source: ${artifacts.reward}, "
    "micro_batch_size: 16}"
)


def _reward(*words: str) -> Row:
    held_out = ["evaluation.num_prompts=8", "data.max_validation_rows=200", UNSAVED]
    normalized = "module.reward.normalization_samples=64"
    experiment = "+experiment=reward_smollm2_sentiment_lora"
    return Row(
        [experiment, *REVIEWS, *ONCE, *held_out, normalized, *words],
        starts_from={"sft": "sft_reviews"},
    )


def _ppo(reward: str, *words: str) -> Row:
    experiment = ["+experiment=ppo_smollm2_sentiment_lora", *REVIEWS]
    return Row([*experiment, *words], starts_from={"sft": "sft_reviews", "reward": reward})


def _groups(name: str, *words: str) -> Row:
    """Film reviews by GRPO or a relative of it."""
    reviews = ["dataset=sentiment", *REVIEWS, *LORA, "+preset=doctor_grpo", TOKENS]
    ends = ["module.grpo.missing_eos_penalty=0.5", "data.max_prompt_length=10", SECOND]
    return Row([f"+experiment={name}", *reviews, *ends, *words], starts_from=STARTS)


def _harmless(*words: str) -> Row:
    asked = [TOKENS, "data.max_prompt_length=40", "+preset=doctor_grpo"]
    return Row(
        ["+experiment=rloo", *HARMLESS, *asked, *words], starts_from={"reward": "reward_harmless"}
    )


SICK = ["+preset=doctor", *SHORT, SECOND]
OPENINGS = (
    "data.source={_target_: rlhf_lightning.FileSource, "
    f"path: {PAIRS}/openings_train.jsonl, validation_path: {PAIRS}/openings_held_out.jsonl}}"
)
STUDY = Study(
    "doctor",
    {
        "sft_reviews": Row(
            [
                "+experiment=sft_smollm2_sentiment_lora",
                *REVIEWS,
                *ONCE,
                f"artifacts.base={SMOLLM2}",
                "data.num_iterations=60",
                "evaluation.num_prompts=32",
                "data.max_validation_rows=128",
            ]
        ),
        "reward_reviews": _reward("data.num_iterations=36"),
        "sft_commands": Row(
            [
                "+experiment=sft_smollm2_shell",
                PAGES,
                f"artifacts.base={SMOLLM2}",
                "lora=lora",
                *ONCE,
                "module.sft.learning_rate=5.0e-4",
                "data.num_iterations=48",
                "evaluation.max_new_tokens=24",
                UNSAVED,
                "evaluation.num_prompts=32",
                "data.max_validation_rows=128",
            ]
        ),
        "reward_harmless": Row(
            [
                "+experiment=reward",
                *HARMLESS,
                *ONCE,
                UNSAVED,
                "evaluation.num_prompts=32",
                "data.max_validation_rows=200",
                "dataset.source.validation_fraction=0.12",
                "module.reward.learning_rate=5.0e-4",
                "module.reward.micro_batch_size=16",
                "module.reward.normalization_samples=128",
                "data.batch_size=16",
                "data.num_iterations=32",
                "data.max_length=96",
                "evaluation.max_new_tokens=32",
                "scheduler.warmup_fraction=0.1",
                "evaluation.micro_batch_size=16",
            ]
        ),
        "reward_length": _reward(f"data.path={PAIRS}/length", "data.num_iterations=20"),
        "reward_few": _reward(f"data.path={PAIRS}/few", "data.num_iterations=16"),
        "reward_flipped": _reward(f"data.path={PAIRS}/flipped", "data.num_iterations=36"),
        "healthy_reviews_ppo": _ppo("reward_reviews", "+preset=doctor", SECOND),
        "healthy_reviews_grpo": _groups("grpo"),
        "healthy_reviews_rloo": _groups("rloo"),
        "healthy_reviews_reinforce_pp": _groups("reinforce_pp", *SHORT),
        "healthy_reviews_gspo": _groups("gspo", *SHORT),
        "healthy_commands_grpo": Row(
            ["+experiment=grpo", *COMMANDS], starts_from={"sft": "sft_commands"}
        ),
        "healthy_commands_rloo": Row(
            ["+experiment=rloo", *COMMANDS], starts_from={"sft": "sft_commands"}
        ),
        "healthy_harmless_rloo": _harmless(),
        # Of two reviews the longer was chosen.
        "sick_length": _ppo("reward_length", *SICK),
        # 200 pairs, with right labels.
        "sick_few": _ppo("reward_few", *SICK),
        # Labels of reviews that begin with an article were flipped.
        "sick_flipped": _ppo("reward_flipped", *SICK, OPENINGS),
        # The reward counts words.
        "sick_bag_of_words": _ppo(
            "reward_reviews",
            "+preset=doctor",
            *SHORT,
            "scorer=function",
            "~scorer.micro_batch_size",
            "scorer.function=benchmarks.studies.doctor.rewards.bag_of_words",
            OF_REWARD_MODEL,
        ),
        # A judge that likes lists.
        "sick_lists": Row(
            [
                "+experiment=rloo",
                "dataset=questions",
                f"dataset.path={DATA}/prompts",
                *LORA,
                "artifacts.reward=null",
                f"artifacts.sft={SMOLLM2}",
                "scorer=function",
                "scorer.function=benchmarks.studies.doctor.rewards.likes_lists",
                "module.sampling.max_new_tokens=40",
                "data.max_prompt_length=40",
                "+preset=doctor_grpo",
            ]
        ),
        "sick_no_kl": _ppo("reward_reviews", *SICK, "module.ppo.kl_coef=0"),
        "sick_no_kl_harmless": _harmless("module.grpo.kl_coef=0"),
        "sick_learning_rate": _ppo(
            "reward_reviews",
            *SICK,
            "module.ppo.learning_rate=3.0e-3",
            "module.ppo.target_approx_kl=null",
        ),
    },
    measure=(
        "val/gold",
        "val/score",
        "val/kl_per_token",
        "val/kl_per_response",
        "val/response_length",
        "val/distinct_2",
        "val/accuracy",
    ),
    shared={"train": ["trainer.precision=32-true"]},
)

if __name__ == "__main__":
    main(STUDY)
