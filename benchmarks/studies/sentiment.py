"""Objectives on film reviews at three KL strengths, judged by a classifier that no stage saw.

    python -m benchmarks.studies.sentiment {train,evaluate}:dataset.positive=FILE \
        {train,evaluate}:dataset.negative=FILE

Beside Rafailov et al. 2023, figure 2, left: DPO's frontier of reward against KL lies above PPO's.
There GPT-2 large on IMDb; here SmolLM2-135M with LoRA on Pang and Lee's sentences, two seeds.
Without the hub `train:artifacts.base=FOLDER`.
"""

from __future__ import annotations

from benchmarks.studies.run import Row, Study, main
from benchmarks.studies.trade_off import comparison

STARTS = {"sft": "sft", "reward": "reward"}
REVIEWS = ["dataset=sentiment", "model=pretrained", "lora=lora"]
STUDY = Study(
    "sentiment",
    {
        "sft": Row(["+experiment=sft_smollm2_sentiment_lora"]),
        "reward": Row(["+experiment=reward_smollm2_sentiment_lora"], starts_from={"sft": "sft"}),
        "ppo": Row(
            ["+experiment=ppo_smollm2_sentiment_lora"],
            starts_from=STARTS,
            vary={"module.ppo.kl_coef": [0.02, 0.05, 0.2]},
        ),
        "grpo": Row(
            [
                "+experiment=grpo",
                *REVIEWS,
                "module.grpo.learning_rate=3.0e-4",
                "module.grpo.num_minibatches=2",
                "module.grpo.micro_batch_size=8",
                "module.grpo.missing_eos_penalty=0.5",
                "module.grpo.target_approx_kl=0.2",
                "scheduler.warmup_fraction=0.06",
                "module.sampling.max_new_tokens=24",
                "data.batch_size=16",
                "data.num_generations=4",
                "data.num_iterations=30",
                "data.max_prompt_length=10",
                "evaluation.num_prompts=300",
            ],
            starts_from=STARTS,
            vary={"module.grpo.kl_coef": [0.02, 0.05, 0.2]},
        ),
        "dpo": Row(
            [
                "+experiment=dpo",
                *REVIEWS,
                "module.dpo.learning_rate=1.0e-4",
                "module.dpo.micro_batch_size=16",
                "data.batch_size=32",
                "data.max_length=48",
                "evaluation.max_new_tokens=24",
                "evaluation.num_prompts=300",
            ],
            starts_from={"sft": "sft"},
            vary={"module.dpo.beta": [0.05, 0.1, 0.5]},
        ),
        "best_of_n": Row(
            ["policy=${artifacts.sft}", "best_of.n=[1,2,4,16]", "best_of.pool=16"],
            "evaluate",
            starts_from=STARTS,
        ),
    },
    seeds=(1, 2),
    measure=(
        "val/gold",
        "val/kl_per_token",
        "val/kl_per_response",
        "val/score",
        "val/response_length",
        "val/distinct_2",
    ),
    shared={
        "train": ["logger=none", "gates=none", "trainer.precision=32-true"],
        "evaluate": [
            "model=pretrained",
            "dataset=sentiment",
            "safety=none",
            "trainer.precision=32-true",
            "prompts.max_length=10",
            "evaluation.num_prompts=300",
            "evaluation.max_new_tokens=24",
        ],
    },
    also=lambda results: comparison(results, (0.1, 0.2, 0.4), gain="val/gold"),
)

if __name__ == "__main__":
    main(STUDY)
