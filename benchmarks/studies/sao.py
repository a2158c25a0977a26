"""SAO against GRPO on a real model, by a reward that can be checked, at equal samples.

    RLHF_DATA=FOLDER SMOLLM2=FOLDER python -m benchmarks.studies.sao --jobs 2

RLHF_DATA has `tldr_pages`, SMOLLM2 is SmolLM2-135M-Instruct. SAO has one response a prompt and a
value model, GRPO four responses a prompt. The reward is 0.5 for the right program and 0.5 times the
F1 of its arguments.
"""

from __future__ import annotations

from benchmarks.studies.run import Row, Study, env, main

REWARD = [
    "scorer=function",
    "scorer.function=rlhf_lightning.rollout.scorers.verifiable.command_reward",
    "artifacts.reward=null",
    "data.max_prompt_length=64",
    "module.sampling.max_new_tokens=24",
    "data.num_iterations=20",
    "evaluation.num_prompts=192",
    "evaluation.every_n_iterations=1000",
]
STUDY = Study(
    "sao_commands",
    {
        "sft": Row(
            [
                "+experiment=sft_smollm2_shell",
                f"artifacts.base={env('SMOLLM2')}",
                "module.sft.learning_rate=5.0e-4",
                "data.num_iterations=48",
                "data.max_validation_rows=64",
                "evaluation.num_prompts=64",
                "evaluation.max_new_tokens=24",
            ]
        ),
        "sao": Row(
            [
                "+experiment=sao",
                "+preset=doctor",
                *REWARD,
                "module.ppo.critic_warmup_iterations=4",
                "module.ppo.target_approx_kl=null",
                "module.value_head=zero",
                # Responses have 14 tokens: 0.05, VAPO's, would leave a lambda of 0.
                "module.ppo.gae_length_alpha=0.7",
                "module.ppo.num_minibatches=3",
            ],
            starts_from={"sft": "sft"},
        ),
        "grpo": Row(
            [
                "+experiment=grpo",
                "+preset=doctor_grpo",
                *REWARD,
                "module.grpo.target_approx_kl=null",
            ],
            starts_from={"sft": "sft"},
        ),
    },
    seeds=(1, 2),
    measure=(
        "val/gold",
        "val/baseline_gold",
        "val/gold_win_rate",
        "val/kl_per_token",
        "val/kl_per_response",
        "val/response_length",
    ),
    shared={
        "train": [
            "dataset=shell_commands",
            f"dataset.path={env('RLHF_DATA')}/tldr_pages/examples.jsonl.gz",
            "dataset.gold={_target_: rlhf_lightning.CommandGold}",
            "trainer.precision=32-true",
            "model=pretrained",
            "lora=lora",
            "logger=none",
            "gates=none",
            "trainer.validations=1",
            "callbacks.checkpoint.every_n_iterations=1000",
            "evaluation.temperature=1.0",
            "evaluation.batch_size=32",
            "evaluation.micro_batch_size=16",
        ]
    },
)

if __name__ == "__main__":
    main(STUDY)
