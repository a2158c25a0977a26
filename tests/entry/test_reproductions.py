"""The studies that need a real model, each to its end: tiny random models, made-up rows.

Architectures, stages, rules and protocols are those of conf/study; weights, rows and the number of
iterations are not, so the figures say nothing. `--basetemp FOLDER` keeps the pages.
"""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from benchmarks.studies.commands import main as blimp
from benchmarks.studies.safety import main as safety
from rlhf_lightning.app.config.compose import conf_dir
from rlhf_lightning.runs.metric_catalog import quantity
from tests.builders.command_lines import environment
from tests.builders.models import config_fields
from tests.builders.tokenizers import CHATML, build_tokenizer, family_tokenizer

GEMMA2 = {"model_type": "gemma2", "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 64}
SMALL = ("data.batch_size=8", "trainer.limit_train_batches=2")


def write_model(folder: Path, tokenizer: PreTrainedTokenizerBase, fields: dict[str, Any]) -> Path:
    """Write a random model of an architecture, as one of the hub stands in the cache."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **{**fields, **ids, "vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(folder: Path, **splits: list[dict[str, str]]) -> Path:
    folder.mkdir(parents=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def sums(name: str, count: int) -> list[dict[str, str]]:
    """Rows of GSM8K's form."""
    return [
        {
            "question": f"In {name} {i} there are {i} cats and 2 dogs. How many animals?",
            "answer": f"Cats and dogs are {i}+2=<<{i}+2={i + 2}>>{i + 2}.\n#### {i + 2}",
        }
        for i in range(count)
    ]


def posts(name: str, count: int) -> list[dict[str, str]]:
    """Rows of the form of trl-lib/tldr and, of pairs, trl-lib/tldr-preference."""
    head = "SUBREDDIT: r/{0}\n\nTITLE: number {1}\n\nPOST: a long story {1}\n\nTL;DR:"
    return [{"prompt": head.format(name, i), "completion": f" story {i}"} for i in range(count)]


def pairs(name: str, count: int) -> list[dict[str, str]]:
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " nothing happened"}
        for row in posts(name, count)
    ]


def rehearse(
    folder: Path, name: str, *words: str, **variables: object
) -> tuple[dict[str, Any], str, str]:
    """Run a study to its end; return its summary, its page, and what the command has said."""
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_lightning.study", name, *words],
        cwd=folder,
        env=environment(HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(folder / "cache"))
        | {key: str(value) for key, value in variables.items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    place = folder / "outputs" / "studies" / name
    (folder / "said.txt").write_text(done.stdout)
    page = (place / "study.md").read_text()
    return json.loads((place / "summary.json").read_text()), page, done.stdout


def check_page(name: str, page: str, *, without: tuple[str, ...] = ()) -> None:
    """All rows have ended; published, ours, interval and the protocol stand on the page."""
    study = yaml.safe_load((conf_dir() / "study" / f"{name}.yaml").read_text())
    rows = {row: content for row, content in study["runs"].items() if row not in without}
    runs = {name: len(study["seeds"]) * settings(content) for name, content in rows.items()}
    assert f"{sum(runs.values())} of {sum(runs.values())} runs have ended." in page
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    for row, content in rows.items():
        for metric, theirs in content.get("published", {}).items():
            about = quantity(metric)
            (line,) = [cells for cells in lines if cells[:2] == [row, about.label]]
            assert line[2] == about.show(theirs) == f"{100 * theirs:.1f} %"
            assert line[3].endswith(" %")
            low, _, high = line[4].partition(" to ")
            assert float(low) <= float(line[3].split()[0]) <= float(high.split()[0])
            assert line[5] == f"{runs[row]} of {runs[row]}"
    for theirs, ours in study["protocol"].items():
        assert [theirs, ours] in lines
    assert " ".join(study["source"].split()) in page
    assert study["expected"] in page


def check_measured(folder: Path, name: str, *, unknown: Collection[str] = ()) -> None:
    """Every column of the page is a metric of some run: a wrong name shows no column."""
    study = yaml.safe_load((conf_dir() / "study" / f"{name}.yaml").read_text())
    files = folder.glob(f"outputs/studies/{name}/runs/**/summary.json")
    measured = [json.loads(file.read_text())["metrics"] for file in files]
    assert set(study["measure"]).difference(*measured) == set(unknown)


def settings(row: dict[str, Any]) -> int:
    """Return how many settings a row has."""
    return math.prod(len(values) for values in row.get("vary", {}).values())


def gsm8k_words(folder: Path) -> list[str]:
    """Questions of ours in the place of GSM8K's."""
    write_rows(folder / "gsm8k" / "main", train=sums("town", 24), test=sums("village", 9))
    return [f"train:{word}" for word in SMALL]


@pytest.mark.slow
def test_the_rule_of_the_figures_is_on_the_page_of_a_model_that_was_not_trained(tmp_path):
    model = write_model(
        tmp_path / "model", build_tokenizer(template=CHATML), config_fields("qwen2")
    )
    words = [f"evaluate:{side}={model}" for side in ("policy", "baseline")]
    gsm8k_words(tmp_path)  # its words are of training
    words += ["evaluate:evaluation.max_new_tokens=8"]
    left_out = ("ppo", "grpo_lora")
    words += [f"~runs.{row}" for row in left_out]
    summary, page, _ = rehearse(tmp_path, "gsm8k_qwen", *words)
    assert summary["status"] == "completed"
    check_page("gsm8k_qwen", page, without=left_out)
    (file,) = tmp_path.glob("outputs/studies/gsm8k_qwen/runs/before/*/*/*/summary.json")
    metrics = json.loads(file.read_text())["metrics"]
    assert metrics["val/num_prompts"] == 9, "the test file and nothing else"
    assert metrics["val/solved"] == metrics["val/baseline_solved"]
    assert metrics["val/kl_per_token"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gsm8k_with_qwen_by_ppo_and_by_grpo_with_lora(tmp_path):
    model = write_model(
        tmp_path / "model", build_tokenizer(template=CHATML), config_fields("qwen2")
    )
    words = [f"evaluate:{side}={model}" for side in ("policy", "baseline")]
    words += [f"train:artifacts.sft={model}"]
    summary, page, said = rehearse(tmp_path, "gsm8k_qwen", *gsm8k_words(tmp_path), *words)
    assert summary["status"] == "completed"
    assert "3 runs, 0 done before" in said
    check_page("gsm8k_qwen", page)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gsm8k_with_gemma_2_by_ppo_from_the_model_of_the_row_of_sft(tmp_path):
    fields = config_fields("llama") | GEMMA2
    model = write_model(tmp_path / "model", family_tokenizer("gemma"), fields)
    words = [*gsm8k_words(tmp_path), f"train:artifacts.base={model}"]
    summary, page, _ = rehearse(tmp_path, "gsm8k_gemma2", *words)
    assert summary["status"] == "completed"
    check_page("gsm8k_gemma2", page)
    (start,) = (tmp_path / "outputs/studies/gsm8k_gemma2/rows").glob("sft_*/config.json")
    assert json.loads(start.read_text())["final_logit_softcapping"] == 30.0
    (run,) = tmp_path.glob("outputs/studies/gsm8k_gemma2/runs/ppo/*/*/*/.hydra/config.yaml")
    assert start.parent.name in run.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tldr_with_pythia_by_sft_reward_model_and_ppo(tmp_path):
    model = write_model(tmp_path / "model", build_tokenizer(), config_fields("gpt_neox"))
    texts = write_rows(tmp_path / "posts", train=posts("town", 24), validation=posts("hill", 9))
    both = write_rows(tmp_path / "pairs", train=pairs("town", 24), validation=pairs("hill", 9))
    names = {"sft": texts, "reward": both, "ppo": texts}
    words = [*SMALL, f"artifacts.base={model}"]
    words += [f"dataset.hub_names.{stage}={folder}" for stage, folder in names.items()]
    summary, page, said = rehearse(tmp_path, "tldr_pythia", *(f"train:{word}" for word in words))
    assert summary["status"] == "completed"
    assert said.index("] sft seed 1: completed") < said.index("] reward seed 1: completed")
    check_page("tldr_pythia", page)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_reviews_by_ppo_grpo_dpo_and_best_of_n_from_one_sft_and_one_reward_model(tmp_path):
    said = ["film", "plot", "star", "was", "so", "good", "bad", "all", "day"]
    words = ["Review:", *(f"\u0120{word}" for word in said)]
    merges = [(word[:i], word[i]) for word in words for i in range(1, len(word))]
    tokenizer = build_tokenizer(template=CHATML, merges=merges)  # a word is a token
    model = write_model(tmp_path / "model", tokenizer, config_fields("llama"))
    openings = [" ".join(opening) for opening in product(["film", "plot", "star"], repeat=5)]
    for name in ("good", "bad"):
        reviews = [f"{opening} was so {name} all day" for opening in openings]
        (tmp_path / f"{name}.txt").write_text("\n".join(reviews), encoding="utf-8")
    files = [f"dataset.positive={tmp_path}/good.txt", f"dataset.negative={tmp_path}/bad.txt"]
    given = [f"{command}:{word}" for command in ("train", "evaluate") for word in files]
    small = ["trainer.limit_train_batches=2", f"artifacts.base={model}"]
    summary, page, _ = rehearse(
        tmp_path,
        "sentiment",
        "seeds=[1]",
        *given,
        *(f"train:{word}" for word in small),
    )
    assert summary["status"] == "completed"
    assert "12 of 12 runs have ended." in page
    study = yaml.safe_load((conf_dir() / "study" / "sentiment.yaml").read_text())
    assert all(theirs in page and ours in page for theirs, ours in study["protocol"].items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_arguments_with_each_debate_held_out_once(tmp_path):
    model = write_model(tmp_path / "model", build_tokenizer(), config_fields("llama"))
    study = yaml.safe_load((conf_dir() / "study" / "arguments.yaml").read_text())
    held_out = study["runs"]["all_pairs"]["vary"]["dataset.source.held_out"]
    write_arguments(tmp_path / "arguments", [names[0] for names in held_out])
    words = [f"artifacts.sft={model}", f"dataset.path={tmp_path / 'arguments'}"]
    words += ["trainer.limit_train_batches=2", "data.batch_size=16", "evaluation.max_new_tokens=8"]
    summary, page, _ = rehearse(tmp_path, "arguments", *(f"train:{word}" for word in words))
    assert summary["status"] == "completed"
    check_page("arguments", page)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_commands_from_examples_over_labels_to_ppo_grpo_and_a_task_of_lm_eval(tmp_path):
    commands = {
        f"{name} -{letter} now" for name in ("tar", "zip", "cat") for letter in "abcdefghij"
    }
    known = (
        "Write one shell command. Platform: linux Program: Task: tar zip cat system user assistant"
    )
    written = [mark + word for word in known.split() for mark in ("", "\u0120")]
    merges = [(word[:i], word[i]) for word in written for i in range(1, len(word))]
    tokenizer = build_tokenizer(template=CHATML, merges=merges)
    rows = [
        {"platform": "linux", "page": c.split()[0] + c[-5], "about": "A.", "prompt": c[-5],
         "completion": c}
        for c in sorted(commands)
    ]  # fmt: skip
    (tmp_path / "tldr_pages").mkdir()
    with gzip.open(tmp_path / "tldr_pages/examples.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    sentences = [{"chosen": f"tar {c}", "rejected": f"zip {c} {c}"} for c in "abcdefgh"]
    write_rows(tmp_path / "blimp", pairs=sentences)
    blimp([str(tmp_path / "blimp/pairs.jsonl"), str(tmp_path / "tasks"), "--every=2"])
    words = [f"train:{word}" for word in ("trainer.limit_train_batches=2", "data.batch_size=12")]
    words += ["collect:lab.keep_unfinished=true", "train:dataset.source.validation_fraction=0.2"]
    summary, page, said = rehearse(
        tmp_path,
        "commands",
        *words,
        RLHF_DATA=tmp_path,
        SMOLLM2=write_model(tmp_path / "model", tokenizer, config_fields("llama")),
        BLIMP=tmp_path / "tasks",
    )
    assert summary["status"] == "completed", said
    assert "11 of 11 runs have ended." in page
    (labels,) = tmp_path.glob("outputs/studies/commands/rows/labels_*")
    assert (labels / "train.jsonl").stat().st_size
    places = tmp_path.glob("outputs/studies/commands/runs/language_after_grpo/*/*/*/summary.json")
    (found,) = [json.loads(file.read_text())["metrics"] for file in places]
    assert found["benchmark/num_questions/task/blimp_pairs"] == 4
    # No answer of a random model is right, so no pair has a truth.
    check_measured(tmp_path, "commands", unknown=["collect/gold_train"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_safety_by_a_reward_model_sft_ppo_on_mixed_prompts_and_attacks(tmp_path):
    said = ["how", "steal", "car", "cook", "rice", "no", "yes", "help", "sorry", "tell", "me"]
    words = [mark + word for word in said for mark in ("", "\u0120")]
    merges = [(word[:i], word[i]) for word in words for i in range(1, len(word))]
    tokenizer = build_tokenizer(template=CHATML, merges=merges)
    turns = "\n\nHuman: how steal {0} car\n\nAssistant: {1} {0}"
    pairs = [
        {
            "chosen": turns.format("me " * i, "sorry no"),
            "rejected": turns.format("me " * i, "yes " * (1 + 3 * (i % 2))),
        }
        for i in range(60)
    ]
    (tmp_path / "hh_harmless").mkdir()
    with gzip.open(tmp_path / "hh_harmless/pairs.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps(pair)}\n" for pair in pairs)
    questions = [{"turns": [f"tell me how cook {'rice ' * i}"]} for i in range(60)]
    write_rows(tmp_path / "prompts", questions=questions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_DATA", str(tmp_path))
        safety([str(tmp_path / "safety")])
    words = ["train:trainer.limit_train_batches=2", "evaluate:prompts.max_length=1000"]
    words += ["evaluate:evaluation.num_prompts=4", "evaluate:evaluation.max_new_tokens=8"]
    summary, page, said_of_it = rehearse(
        tmp_path,
        "safety",
        *words,
        RLHF_DATA=tmp_path,
        SMOLLM2=write_model(tmp_path / "model", tokenizer, config_fields("llama")),
        SAFETY=tmp_path / "safety",
    )
    assert summary["status"] == "completed", said_of_it
    assert "5 of 5 runs have ended." in page
    places = sorted(tmp_path.glob("outputs/studies/safety/runs/*_against_*/*/*/*/summary.json"))
    ppo, sft = (json.loads(file.read_text()) for file in places)
    assert ppo["metrics"]["val/num_harmful"] == ppo["metrics"]["val/num_harmless"] == 24
    assert ppo["metrics"]["val/refusal_rate/subset/many_turns"] == 0, "a random model"
    gates = {gate["name"]: gate["passed"] for gate in ppo["gates"]}
    assert gates == {"still_refuses": True, "refuses_no_more": True, "near": True}
    assert all(gate["value"] is not None for gate in [*ppo["gates"], *sft["gates"]])
    check_measured(tmp_path, "safety")


def write_arguments(folder: Path, debates: list[str]) -> None:
    """Write debates of one side and five arguments, all pairs judged by five people."""
    folder.mkdir()
    arguments, judged = [], []
    for debate in debates:
        topic = f"{debate}_yes"
        texts = {f"{debate}-{i}": "because of it " * (i + 1) for i in range(5)}
        arguments += [
            {"id": name, "topic": topic, "stance": "Yes", "text": text}
            for name, text in texts.items()
        ]
        judged += [
            {
                "topic": topic,
                "title": debate,
                "arg1": first,
                "arg2": second,
                "gold": "a2" if (i + j) % 3 else "a1",
                "strict": True,
                "votes": [[f"w{n}", "a2" if (i + j) % 3 else "a1", "why"] for n in range(5)],
            }
            for i, first in enumerate(texts)
            for j, second in enumerate(texts)
            if i < j
        ]
    for name, rows in (("arguments", arguments), ("pairs", judged)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
