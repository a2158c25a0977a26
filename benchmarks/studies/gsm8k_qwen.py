"""Qwen2.5-0.5B-Instruct on GSM8K by PPO and by GRPO with LoRA, beside verl's figures.

    hf download openai/gsm8k --repo-type dataset --local-dir gsm8k
    python -m benchmarks.studies.gsm8k_qwen

Not run on a GPU yet; needs one of 80 GB. Sources: verl, docs/algo/baseline.md of
github.com/volcengine/verl at commit b178a3cd, and the logs it names in
github.com/eric-haibin-lin/verl-data, branch experiments, folder gsm8k
(Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log and
Qwen2.5-0.5B-bsz64_2-prompt512-resp1024-lorarank32-score0.543.log).

The reward is 1 where the first `#### number` is right, else 0, as in both logs. What differs: the
request for `####` has other words (`train:dataset.source.prompt=` gives verl's); all 1,319 test
questions, where PPO's log has 1,312; the value head begins at 0, where verl draws it; the mean over
all tokens of a step, where verl averages micro-batches of 2 rows; one GPU, rollout=cached. 49.6
before training is of Qwen's blog, whose prompt and rule are not confirmed. One seed on each side.
"""

from __future__ import annotations

from benchmarks.studies.run import Row, Study, main

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
STUDY = Study(
    "gsm8k_qwen",
    {
        "before": Row(
            [
                "model=qwen2_5_0_5b",
                f"policy={QWEN}",
                f"baseline={QWEN}",
                "dataset=gsm8k_verl",
                "dataset.reward.strict=null",
                "dataset.reward.fallback=last_number",
                "scorer=none",
                "safety=none",
                "prompts.max_length=512",
                "evaluation.num_prompts=1319",
                "evaluation.temperature=0.0",
                "evaluation.batch_size=256",
                "evaluation.micro_batch_size=16",
                "evaluation.max_new_tokens=512",
            ],
            "evaluate",
            published={"val/solved": 0.496},
        ),
        "ppo": Row(
            [
                "+experiment=ppo",
                "data.batch_size=256",
                "data.num_iterations=435",
                "module.sampling.max_new_tokens=512",
                "module.value_head=zero",
                "module.ppo.learning_rate=1.0e-6",
                "module.ppo.value_learning_rate=1.0e-5",
                "module.ppo.num_ppo_epochs=1",
                "module.ppo.num_minibatches=4",
                "module.ppo.micro_batch_size=16",
                "module.ppo.kl_coef=0.001",
                "module.ppo.cliprange_value=0.5",
                "module.ppo.vf_coef=1.0",
                "module.ppo.gae_lambda=1.0",
                "module.ppo.entropy_coef=0.001",
                "module.ppo.missing_eos_penalty=0.0",
                "module.ppo.score_clip=null",
                "module.ppo.target_approx_kl=null",
            ],
            published={"val/solved": 0.567, "val/baseline_solved": 0.00076},
        ),
        "grpo_lora": Row(
            [
                "+experiment=grpo",
                "lora=lora",
                "lora.r=32",
                "lora.alpha=32",
                "data.batch_size=64",
                "data.num_generations=5",
                "data.num_iterations=116",
                "module.sampling.max_new_tokens=1024",
                "module.grpo.learning_rate=3.0e-5",
                "module.grpo.num_epochs=1",
                "module.grpo.num_minibatches=1",
                "module.grpo.micro_batch_size=16",
                "module.grpo.kl_in=loss",
                "module.grpo.kl_estimator=k3",
                "module.grpo.kl_coef=0.001",
                "module.grpo.dual_clip=3.0",
                "module.grpo.entropy_coef=0.001",
                "module.grpo.missing_eos_penalty=0.0",
                "module.grpo.score_clip=null",
                "module.grpo.target_approx_kl=null",
            ],
            published={"val/solved": 0.543},
        ),
    },
    measure=(
        "val/solved",
        "val/baseline_solved",
        "val/answered",
        "val/response_length",
        "val/eos_fraction",
    ),
    shared={
        "train": [
            "model=qwen2_5_0_5b",
            "dataset=gsm8k_verl",
            "logger=none",
            f"artifacts.sft={QWEN}",
            "artifacts.reward=null",
            "scorer=function",
            "scorer.function=${dataset.reward}",
            "scheduler=constant",
            "scheduler.warmup_fraction=0.0",
            "optimizer.eps=1.0e-8",
            "optimizer.weight_decay=0.01",
            "data.max_prompt_length=512",
            "evaluation.num_prompts=1319",
            "evaluation.temperature=0.0",
            "evaluation.batch_size=256",
        ]
    },
)

if __name__ == "__main__":
    main(STUDY)
