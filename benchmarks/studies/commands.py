"""RLHF from labels: examples, candidates, labels, reward models, PPO, its cost in language.

    export RLHF_DATA=FOLDER SMOLLM2=FOLDER BLIMP=tasks
    python -m benchmarks.studies.blimp $RLHF_DATA/blimp/pairs.jsonl.gz $BLIMP
    python -m benchmarks.studies.commands --jobs 2

SmolLM2-135M with LoRA writes shell commands (RLHF_DATA has `tldr_pages` and `blimp`). Gold is 0.5
for the right program and 0.5 times the F1 of its arguments. A rule and a simulated crowd label;
reward models of three amounts of labels see nothing else; GRPO follows the rule that knows the
command.
"""

from __future__ import annotations

import re

from benchmarks.studies.run import Row, Study, env, main

PROGRAM = re.compile(r"^Program: (.+?)\. ", re.MULTILINE)


def names_the_program(prompt: str, response: str) -> float:
    """Return 1.0 for a command that begins with the program that the prompt names, else 0.0.

    Pages of subcommands, such as `git-commit`, are named after program and subcommand.
    """
    named, words = PROGRAM.search(prompt), response.split()
    return float(
        named is not None
        and bool(words)
        and (named[1] == words[0] or named[1].startswith(f"{words[0]}-"))
    )


DATA = [
    "dataset=shell_commands",
    f"dataset.path={env('RLHF_DATA')}/tldr_pages/examples.jsonl.gz",
    "dataset.gold={_target_: rlhf_lightning.CommandGold}",
    "trainer.precision=32-true",
    "model=pretrained",
]
RULE = (
    "+annotator.automatic.program={_target_: rlhf_lightning.RuleAnnotator, name: program, rules: "
    "[{_target_: rlhf_lightning.CallableRule, "
    "function: benchmarks.studies.commands.names_the_program}]}"
)
ASKED = ["data.max_prompt_length=64", "module.sampling.max_new_tokens=24"]
LANGUAGE = [
    "trainer.precision=32-true",
    "scorer=none",
    "benchmark=lm_eval",
    "benchmark.tasks=[blimp_pairs]",
    f"benchmark.include_path={env('BLIMP')}",
]


def _reward(iterations: int) -> Row:
    words = [
        "+experiment=reward",
        f"data.num_iterations={iterations}",
        "data.batch_size=8",
        "data.num_epochs=null",
        "data.group_by_prompt=true",
        "data.max_length=120",
        "data.max_validation_rows=500",
        "module.reward.learning_rate=3.0e-4",
        "module.reward.micro_batch_size=null",
        "module.reward.normalization_samples=128",
        "evaluation.max_new_tokens=24",
    ]
    return Row(words, starts_from={"sft": "sft", "data.path": "labels"})


STUDY = Study(
    "commands",
    {
        "sft": Row(
            [
                "+experiment=sft_smollm2_shell",
                f"artifacts.base={env('SMOLLM2')}",
                "module.sft.learning_rate=5.0e-4",
                "data.num_iterations=48",
                "data.max_validation_rows=128",
                "evaluation.max_new_tokens=24",
            ]
        ),
        "labels": Row(
            [
                "artifacts.base=null",
                "annotator=crowd",
                RULE,
                "candidates.num_prompts=2000",
                "candidates.max_prompt_length=96",
                "candidates.num_samples=5",
                "candidates.decoding.temperature=[1.0]",
                "candidates.decoding.top_p=[1.0]",
                "candidates.max_new_tokens=24",
                "lab.pairs_per_prompt=5",
                "lab.num_pairs=8000",
            ],
            "collect",
            starts_from={"sft": "sft"},
        ),
        "reward_200": _reward(25),
        "reward_1000": _reward(125),
        "reward_3000": _reward(375),
        **{
            f"ppo_{pairs}": Row(
                ["+experiment=ppo", "+preset=doctor", *ASKED],
                starts_from={"sft": "sft", "reward": f"reward_{pairs}"},
            )
            for pairs in (200, 1000, 3000)
        },
        "grpo": Row(
            [
                "+experiment=grpo",
                "+preset=doctor_grpo",
                *ASKED,
                "artifacts.reward=null",
                "scorer=function",
                "scorer.function=rlhf_lightning.rollout.scorers.verifiable.command_reward",
            ],
            starts_from={"sft": "sft"},
        ),
        **{
            f"language_after_{row}": Row(
                LANGUAGE, "evaluate", starts_from={"policy": row, "baseline": "sft"}
            )
            for row in ("ppo_3000", "grpo")
        },
    },
    measure=(
        "val/gold",
        "val/baseline_gold",
        "val/score",
        "val/kl_per_token",
        "val/kl_per_response",
        "val/accuracy",
        "val/label_ceiling",
        "collect/train_records",
        "collect/gold_train",
        "benchmark/acc/task/blimp_pairs",
        "benchmark/acc_change/task/blimp_pairs",
    ),
    shared={
        "train": [
            *DATA,
            "lora=lora",
            "logger=none",
            "gates=none",
            "trainer.validations=1",
            "callbacks.checkpoint.every_n_iterations=1000",
            "evaluation.num_prompts=192",
            "evaluation.temperature=1.0",
            "evaluation.batch_size=32",
            "evaluation.micro_batch_size=16",
        ],
        "collect": DATA,
    },
)

if __name__ == "__main__":
    main(STUDY)
