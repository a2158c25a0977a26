"""What a user can mistype on a command line of training, and what the answer must hold.

Each row is distinct from what other files of the suite assert. `test_mistakes.py` counts them.
"""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """A command line, and three things that its answer must say.

    Args:
        given: the overrides, separated by blanks.
        name: the key, as the user writes it.
        got: the value.
        wanted: what can be written instead, or how to mend it.
    """

    given: str
    name: str
    got: str
    wanted: str


# The names and the form of what is written: these do not compose.
COMPOSITION = [
    Mistake("+experiment=ppoo", "experiment=", "ppoo", "did you mean ppo"),
    Mistake("+experiment=", "experiment=", " is none of", "base, "),
    Mistake("+experiment=ppo +sweeps=nosuch", "sweeps=", "nosuch", "none of ppo_clip, "),
    Mistake("+experiment=ppo world=files", "key ", "world", "did you mean dataset"),
    Mistake("+experiment=ppo scorer=null", "scorer=", "null", "none of function, http"),
    Mistake("+experiment=ppo logger=mlflow", "logger=", "mlflow", "tensorboard, wandb"),
    Mistake("+experiment=ppo sed=1", "sed", "unknown key", "did you mean seed"),
    Mistake("+experiment=sft trainer.max_epochs=2", "max_epochs", "here it is", "data.num_epochs"),
    Mistake("+experiment=grpo trainer.max_epochs=2", "max_epochs", "here", "data.num_iterations"),
    Mistake("+experiment=ppo num_train_epochs=2", "epochs", "here", "data.num_iterations is the"),
    Mistake("+experiment=ppo lr=1e-5", "key lr:", "here it is", "module.ppo.learning_rate"),
    Mistake("+experiment=dpo learning_rate=1", "key", "it is", "module.dpo.learning_rate"),
    Mistake(
        "+experiment=grpo trainer.gradient_clip_val=1", "clip", "is", "module.grpo.max_grad_norm"
    ),
    Mistake("+experiment=grpo output_dir=x", "output_dir", "here it is", "paths.outputs"),
    Mistake("+experiment=dpo beta=0.1", "key beta", "here it is", "module.dpo.beta"),
    Mistake("+experiment=ppo --lr=0.1", "--lr=0.1", "without hyphens", "args_no_hyphens"),
    Mistake("+experiment=ppo module.ppo.kl_coef", "'module.ppo.kl_coef'", "nothing", "KEY=VALUE"),
    Mistake("+experiment=ppo data=[1,2]", "data=", "[1,2]", "none of demonstrations"),
    Mistake("+experiment=ppo =3", "'=3'", "no key", "KEY=VALUE"),
    Mistake("+experiment=ppo seed=1,2", "seed=1,2", "several values", "-m runs a sweep"),
    Mistake("+experiment=ppo seed=[1,2", "seed=", "[1,2", "close what is opened"),
]

# Values that compose and cannot be.
VALUES = [
    Mistake("+experiment=ppo seed=-1", "seed=", "-1", "must be >= 0"),
    Mistake("+experiment=ppo seed=abc", "seed=", "'abc' is str", "expected int"),
    Mistake("+experiment=ppo seed=${nosuch}", "nosuch", "is missing", "set it"),
    Mistake("+experiment=ppo seed=???", "seed", "is not set", "add seed=..."),
    Mistake("+experiment=ppo resume=yes", "resume=", "'yes'", "'auto'"),
    Mistake("+experiment=ppo name=../x", "name=", "'../x'", "use letters, digits"),
    Mistake("+experiment=ppo name=${nosuch:1}", "name", "nosuch", "Unsupported interpolation"),
    Mistake("+experiment=ppo ckpt_path=7", "ckpt_path=", "7 is int", "expected str or None"),
    Mistake("+experiment=ppo ckpt_path=nosuch.ckpt", "ckpt_path=", "nosuch.ckpt", "not exist"),
    Mistake("+experiment=ppo stage=pppo", "stage=", "pppo", "must be one of"),
    Mistake("+experiment=ppo trainer.devices=0", "trainer.devices=", "0", "must be >= 1"),
    Mistake("+experiment=ppo trainer.accelerator=tpu", "trainer.accelerator=", "'tpu'", "'auto'"),
    Mistake("+experiment=ppo trainer.precision=32", "trainer.precision=", "32 must", "32-true"),
    Mistake("+experiment=ppo strategy.name=deepspeed", "strategy.name=", "'deepspeed'", "'fsdp'"),
    Mistake("+experiment=ppo strategy.timeout_minutes=0", "timeout_minutes=", "0", "must be > 0"),
    Mistake(
        "+experiment=ppo strategy=fsdp strategy.compute_dtype=float16",
        "strategy.compute_dtype=",
        "float16",
        "bfloat16",
    ),
    Mistake(
        "+experiment=ppo data.num_generations=null", "num_generations=", "None", "expected int"
    ),
    Mistake("+experiment=sft +dataset.lengths.max_lenght=1", "max_lenght", "unknown", "max_length"),
    Mistake("+experiment=reward optimizer.betas=''", "optimizer", "betas=", "a list"),
    Mistake(
        "+experiment=ppo trainer.devices=3 data.batch_size=128",
        "data.batch_size=",
        "128 is global",
        "use data.batch_size=126 or 132",
    ),
    Mistake("+experiment=sft trainer.devices=64 data.batch_size=32", "batch_size=", "32", "=64"),
    Mistake(
        "+experiment=ppo module.ppo.num_minibatches=256",
        "num_minibatches=",
        "256",
        "batch_size=256",
    ),
    Mistake("+experiment=sft data.batch_size=0", "data.batch_size=", "0", ">= 1"),
    Mistake("+experiment=sft data.num_epochs=null", "num_epochs=", "None", "exactly one"),
    Mistake("+experiment=sft data.num_iterations=3", "data.num_iterations=", "3", "exactly one"),
    Mistake("+experiment=reward data.path=nosuch.jsonl", "data.path=", "nosuch.jsonl", "a file"),
    Mistake("+experiment=sft +dataset.source.num_texts=0", "num_texts", "0", "use 1 or more"),
    Mistake("+experiment=ppo dataset.name=a/b", "dataset.name=", "'a/b'", "use letters, digits"),
    Mistake("+experiment=ppo module=sft", "stage=ppo", "SFTModule", "module=ppo"),
    Mistake("+experiment=ppo module.ppo=null", "module.ppo", "PPOModule", "module=ppo"),
    Mistake("+experiment=cispo module.grpo.dual_clip=3", "dual_clip=", "3", "surrogate=cispo"),
    Mistake(
        "+experiment=grpo module.grpo.overlong_buffer=999",
        "grpo.overlong_buffer=",
        "999",
        "at most module.sampling.max_new_tokens",
    ),
    Mistake("+experiment=grpo data.num_generations=1", "num_generations=", "1", "use 2 or more"),
    Mistake("+experiment=reinforce_pp data.num_generations=0", "generations=", "0", ">= 1"),
    Mistake(
        "+experiment=reinforce_pp module.grpo.scale=group_std", "scale=", "group_std", "global_std"
    ),
    Mistake("+experiment=ppo module.value_head=none", "value_head=", "'none'", "'stored'"),
    Mistake(
        "+experiment=ppo module.ppo.critic_warmup_iterations=200",
        "critic_warmup_iterations=",
        "200",
        "use fewer",
    ),
    Mistake(
        "+experiment=ppo evaluation.larger_reward_model=x", "_model=", "=x", "PPO does not read it"
    ),
    Mistake("+experiment=sft evaluation.every_n_iterations=2", "iterations=", "2", "leave it out"),
    Mistake("+experiment=ppo lora=lora lora.quantization=int8", "quantization=", "'int8'", "nf4"),
    Mistake("+experiment=ppo lora=lora lora.dropout=0.1", "lora.dropout=", "0.1", "PPO needs 0"),
    Mistake("+experiment=ppo optimizer.eps=0", "optimizer.eps=", "0", "divides by 0"),
    Mistake("+experiment=ppo +optimizer.maximize=true", "optimizer.maximize=", "True", "leave"),
    Mistake("+experiment=ppo module.ppo.kl_horizon=5", "ppo.kl_horizon=", "5", "set kl_target"),
    Mistake("+experiment=ppo callbacks.checkpoint.mode=max", "mode=", "max", "checkpoint.monitor"),
    Mistake("+experiment=ppo artifacts.publish=/", "artifacts.publish=", "'/'", "a folder to make"),
    Mistake("+experiment=ppo artifacts.publish=''", "artifacts.publish=", "''", "a folder to make"),
    Mistake("+experiment=ppo safety.harmful=[]", "safety.harmful", "no domain", "safety.prompts"),
    Mistake("+experiment=ppo rollout=vllm rollout.timeout=-1", "timeout=", "-1", "> 0"),
    Mistake("+experiment=ppo rollout=vllm rollout.start_timeout=0", "timeout=", "0", "> 0"),
    Mistake(
        "+experiment=ppo rollout=vllm rollout.logprob_tolerance=-1",
        "rollout.logprob_tolerance=",
        "-1",
        ">= 0",
    ),
    Mistake("+experiment=ppo rollout=vllm rollout.python=''", "python=", "''", "a file"),
    Mistake("+experiment=ppo rollout=vllm rollout.replicas=[]", "replicas=", "[]", "empty"),
    Mistake("+experiment=ppo optimizer.betas=[0.9,1.5]", "optimizer", "1.5", "Invalid beta"),
    Mistake("+experiment=ppo scheduler.warmup_fraction=2", "warmup_fraction=", "2", "< 1"),
    Mistake("+experiment=ppo logger.project=a/b", "logger.project=", "'a/b'", "a name without /"),
    Mistake("+experiment=ppo logger.tags=5", "logger.tags=", "5", "a list"),
    Mistake(
        "+experiment=ppo callbacks.checkpoint.must_save_by=2020-01-01",
        "must_save_by=",
        "'2020-01-01'",
        "before the start",
    ),
    Mistake(
        "+experiment=ppo +callbacks.early_stopping.patience=2", "early_stopping=", "2", "leave it"
    ),
    Mistake(
        "+experiment=sft callbacks.early_stopping=2",
        "early_stopping=",
        "2",
        "group of settings or None",
    ),
    Mistake(
        "+experiment=ppo +gates.mine={metric:val/score,at_least:high}",
        "gates.mine=",
        "at_least='high'",
        "a number",
    ),
    Mistake("+experiment=ppo paths.outputs=", "paths.outputs=", "''", "a folder"),
    Mistake("+experiment=ppo +paths.outpts=x", "paths.outpts", "unknown key", "paths.outputs"),
    Mistake("+experiment=ppo artifacts.sft=nosuch", "artifacts.sft=", "nosuch", "experiment=sft"),
    Mistake("+experiment=ppo artifacts.sft=null", "artifacts.sft", "None", "expected"),
    Mistake("+experiment=ppo scorer=http scorer.url=ftp://x", "scorer.url=", "ftp://x", "http://"),
    Mistake(
        "+experiment=ppo scorer=function scorer.function=reward.py",
        "reward function",
        "'reward.py'",
        "path.py:name",
    ),
    Mistake(
        "+experiment=ppo scorer=function scorer.function=nosuch.py:f",
        "reward function",
        "'nosuch.py:f'",
        "no file",
    ),
]
# What was taken away, or has another form.
FORMS = [
    Mistake("+experiment=ppo ~data.batch_size", "data.batch_size", "is missing", "set it"),
    Mistake("+experiment=ppo ~seed", "refers to seed", "is missing", "set it"),
    Mistake("+experiment=ppo ~scorer", "scorer", "PPO needs", "one of function, http"),
    Mistake("+experiment=ppo callbacks.checkpoint=null", "callbacks.checkpoint=", "None", "group"),
    Mistake("+experiment=ppo evaluation.gold=5", "evaluation.gold=", "5", "_target_="),
    Mistake("+experiment=ppo artifacts.reward=null", "artifacts.reward", "None", "expected"),
    Mistake("+experiment=ppo model.revision=3", "model.revision=", "3 is int", "str or"),
    Mistake(
        "+experiment=ppo model.activation_checkpointing=maybe",
        "activation_checkpointing=",
        "'maybe'",
        "expected bool",
    ),
]
MISTAKES = [*COMPOSITION, *VALUES, *FORMS]
