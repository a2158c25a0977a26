"""A wrong value from Python is refused by the call that was given it, under its argument's name."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import lightning as L
import numpy as np
import pytest
import torch

import rlhf_lightning
from rlhf_lightning import (
    ActionSettings,
    DoctorThresholds,
    DPOModule,
    EndingRule,
    FileSource,
    FunctionScorer,
    HttpScorer,
    JoinedSource,
    JudgeAnnotator,
    LmEvalBenchmark,
    LoraHparams,
    NoReward,
    PeriodicEvaluation,
    PhraseRefusals,
    PolicyGradientModule,
    PPOHparams,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    SafetyCheck,
    SFTHparams,
    SFTModule,
    TextRewardModelScorer,
    WeightedScorer,
    compare,
    gold_scores,
    load_scalar_model,
    trainer_arguments,
)
from rlhf_lightning.arguments import annotations_of, fitting
from rlhf_lightning.modules.schedules import Schedule
from rlhf_lightning.rollout.generators.base import CachedGenerator
from tests.builders.record_files import write_material

pytestmark = pytest.mark.usefixtures("working_folder")


class Plain:
    """A class that is nothing of ours."""


def no_arguments() -> None:
    """Take nothing, give nothing."""


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


VALUES: list[Any] = [
    None, "", "drpo", 5, -1, 0, True, 1.5, math.nan, math.inf, 1e39, 1e-300, 2**32, 10**18,
    [], [""], [5], {}, {"a": 1}, object(), Plain, LoraHparams, no_arguments, b"x",
    Path("not/there"), np.float32(0.5), np.int64(7), torch.tensor(2.0), torch.zeros(2),
    torch.int64, "~nosuch/x", "x" * 5000, "a\0b",
]  # fmt: skip
# Written by hand, not read from the annotations: what each call may take besides types.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    "batch_size": (1, 10**9),
    "validation_batch_size": (1, 10**9),
    "num_generations": (1, 10**9),
    "answers_per_prompt": (1, 10**9),
    "max_new_tokens": (1, 10**9),
    "num_workers": (0, 1024),
    "show_examples": (0, 10**19),
    "num_epochs": (0.1, 1e9),
    "validation_fraction": (0, 0.99),
    "warmup_fraction": (0, 0.99),
}
COUNTS = ("num_iterations", "max_iterations", "num_prompts", "max_length", "max_prompt_length")
COUNTS += ("max_validation_rows", "micro_batch_size", "num_devices", "shard_over", "name")
COUNTS += ("checkpoint_every_n_iterations", "samples_every_n_iterations")
RANGES |= dict.fromkeys(COUNTS, (1, 10**19))
ANY = (-1e30, 1e30)
# Any text may be one of these: a name on the hub, a folder that is made.
NAMED = ("source", "path", "validation_path", "folder", "value", "policy", "revision", "name")
ANY_TEXT = ("name", "revision", "fingerprint", "target_modules", "response", "system", "config")
ANY_TEXT += ("split", "validation_split")
NO_PATH = ("", "~nosuch/x", "x" * 5000, "a\0b")
NAMED += ("target_modules", "fingerprint", "response", "system", "config", "template", "label")
NAMED += ("include_path", "tokenizer", "python", "known", "split", "validation_split")


# They check themselves, or have no annotations that say what is wrong: their messages do not all
# begin with the argument yet.
OPEN = {"compare", "trainer_arguments", "normalize_reward_model"}
OPEN |= {"CallableRule"}  # any function
# Their types and ranges are checked; they take any text, or look for files.
OPEN |= {"BudgetHparams", "CommandGold", "ExactMatchGold"}
OPEN |= {"NumberReward", "RewardEnsembleScorer"}
OPEN |= {"SafetyCheck", "SimulatedPerson", "TemplateSource", "TranscriptSource"}
OPEN |= {"PairsBenchmark", "RewardModelAnnotator"}


def calls() -> list[str]:
    names = [name for name in rlhf_lightning.__all__ if name not in OPEN]
    found = [name for name in names if not hasattr(named(name), "from_pretrained")]
    modules = [name for name in rlhf_lightning.__all__ if hasattr(named(name), "from_pretrained")]
    found += [f"{name}.{method}" for name in modules for method in ("from_pretrained", "__init__")]
    return [*found, "SFTModule.generate", "SFTModule.load_from_checkpoint", "Schedule"]


def named(name: str) -> Any:
    return getattr(rlhf_lightning, name)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files of rows, and a policy as a folder and as a module."""
    made = write_material(tmp_path_factory.mktemp("material"))
    module = SFTModule.from_pretrained(made["policy"])
    module.configure_model()
    return made | {"module": module, "folder": tmp_path_factory.mktemp("folders")}


def call_of(name: str, made: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a public call, and arguments that it takes."""
    first, _, method = name.partition(".")
    call = named(first) if first != "Schedule" else Schedule
    if method == "generate":
        return made["module"].generate, {"prompts": ["w2 w3"], "max_new_tokens": 1}
    if method == "from_pretrained":
        teacher = {"teacher": made["policy"]} if first == "DistillationModule" else {}
        scored = {"policy": made["policy"], "reward": length, **teacher}
        start = scored if "reward_weights" in annotations_of(call.from_pretrained) else None
        return call.from_pretrained, start or {"source": made["policy"]}
    if method == "load_from_checkpoint":
        return call.load_from_checkpoint, {}
    if method:
        parts = {"scorer": FunctionScorer(length), "generator": CachedGenerator([0], 0)}
        parts |= {"tokenizer": made["module"].tokenizer, "optimizer": torch.optim.SGD, "seed": 1}
        parts |= {"schedule": Schedule()} | {key: cls() for key, cls in call.kinds.items()}
        parts |= dict.fromkeys(("models", "model", "policy"), no_arguments)
        return call, {key: parts[key] for key in arguments_of(call) if key in parts}
    return call, needed(made).get(name, {})


def needed(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arguments that a call cannot do without, by its name."""
    data = {"tokenizer": made["module"].tokenizer, "batch_size": 4}
    sides = {"policy": made["module"], "baseline": made["policy"], "prompts": made["prompts"]}
    ids = {"stop_ids": [0], "pad_token_id": 0}
    return {
        "DemonstrationDataModule": {"source": made["demonstrations"]} | data,
        "PreferenceDataModule": {"source": made["pairs"]} | data,
        "PromptDataModule": {"source": made["prompts"]} | data,
        "FileSource": {"path": made["prompts"]},
        "FunctionScorer": {"function": length},
        "RewardModelScorer": {"load": no_arguments},
        "CachedGenerator": ids,
        "CapturedGenerator": ids,
        "TransformersGenerator": ids,
        "WeightedScorer": {"scorers": {"a": FunctionScorer(length)}},
        "FirstRecords": {"source": FileSource(made["prompts"]), "num_records": 2, "num_copies": 1},
        "MixedSource": {"sources": [FileSource(made["prompts"])], "weights": [1.0]},
        "LengthRule": {"words": 3},
        "PairsBenchmark": {"path": made["pairs"]},
        "RewardAdapterScorer": {"source": made["policy"]},
        "RewardModelAnnotator": {"source": made["policy"]},
        "LmEvalBenchmark": {"tasks": ["arc_easy"]},
        "HttpScorer": {"url": "http://127.0.0.1:9/"},
        "HubSource": {"name": "a/b"},
        "JudgeAnnotator": {"model": "m", "api_key_env": None},
        "NumberGold": {"reward": named("NumberReward")()},
        "RuleAnnotator": {"rules": [named("LengthRule")(3)]},
        "TextRewardModelScorer": {"source": made["policy"]},
        "gold_scores": {"prompts": ["a"], "completions": ["b"], "finished": [True]},
        "Panel": {"members": [named("RuleAnnotator")([named("LengthRule")(3)])], "seed": 1},
        "PeriodicEvaluation": {"every_n_iterations": 2},
        "RewardEnsembleScorer": {"load": no_arguments, "sources": [made["policy"]]},
        "SafetyCheck": {"is_refusal": named("PhraseRefusals")()},
        "SimulatedAnnotator": {"name": "a", "temperature": 1.0, "length_bias": 0.0},
        "TemplateSource": {"path": made["prompts"], "prompt": "{prompt}"},
        "VllmGenerator": ids | {"python": sys.executable},
        "compare": sides | {"reward": length, "num_prompts": 1, "max_new_tokens": 1},
        "load_scalar_model": {"source": made["policy"], "head": "zero"},
        "export_model": {"module": made["module"], "folder": made["folder"] / "export"},
        "trainer_arguments": {"folder": made["folder"] / "run"},
    }


def options(hint: Any) -> list[Any]:
    """Return the alternatives of an annotation without its limits."""
    if get_origin(hint) is Annotated:
        return options(get_args(hint)[0])
    union = type(int | str), type(Annotated[int, 1] | None)
    if isinstance(hint, union):
        return [option for one in get_args(hint) for option in options(one)]
    return [hint]


def may_be_meant(argument: str, value: Any, hint: Any, limits: tuple[float, float]) -> bool:
    """Say by Python's own rules, not by the package's, whether a value may be meant."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and not value.shape):
        value = value.item()
    return any(_is(value, option, argument, *limits) for option in options(hint))


def _is(value: Any, option: Any, argument: str, low: float, high: float) -> bool:
    kind = get_origin(option) or option
    if kind is Any:
        return callable(value) and not inspect.isclass(value)
    if kind in (int, float):
        number = type(value) in ((int,) if kind is int else (int, float))
        return number and low <= value <= high and (not value or abs(value) > 1e-30)
    if kind is tuple and get_args(option) == (str, ...):
        return type(value) in (list, tuple) and bool(value) and all(type(v) is str for v in value)
    if kind in (str, Path) and argument in NAMED:
        fits = argument in ANY_TEXT or str(value) not in NO_PATH
        return isinstance(value, kind) and fits and (argument, value) != ("revision", "a\0b")
    if kind is type(None):
        return value is None
    if "Callable" in str(kind):
        return callable(value) and not inspect.isclass(value)
    if getattr(kind, "_is_protocol", False):
        return callable(value) and not inspect.isclass(value)
    return kind not in (str, Path) and inspect.isclass(kind) and isinstance(value, kind)


def arguments_of(call: Callable[..., Any]) -> list[str]:
    found = inspect.signature(call).parameters.values()
    return [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def refusal(call: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    try:
        call(**arguments)
    except (TypeError, ValueError, FileNotFoundError) as error:
        return error
    return None


@pytest.mark.thorough
@pytest.mark.parametrize("name", calls())
def test_every_value_of_every_argument_is_refused_by_name_or_may_be_meant(name, policy):
    call, good = call_of(name, policy)
    for argument in arguments_of(call):
        hint = annotations_of(inspect.unwrap(call))[argument]
        limits = None if name.endswith("Hparams") else RANGES.get(argument)
        for value in VALUES:
            error = refusal(call, good | {argument: value})
            is_default = (
                value is None and inspect.signature(call).parameters[argument].default is None
            )
            meant = is_default or may_be_meant(argument, value, hint, limits or ANY)
            if error is None:
                assert meant, f"{argument}={value!r} was taken"
                continue
            assert not (meant and limits and type(value) is int), f"{argument}: {error}"
            names_it = rf"\b{argument}\b" + (
                f"|{value}" if isinstance(value, Path) or value == "drpo" else ""
            )
            assert re.search(names_it, str(error)[:80]), f"{value!r}: {error}"
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: PPOModule.from_pretrained(p["policy"], length, optimizer=no_arguments),
        lambda p: PPOModule.from_pretrained(p["policy"], length, optimizer=lambda a, b: a),
        lambda p: PPOModule.from_pretrained(p["policy"], length, optimizer=list),
        lambda p: SFTModule.from_pretrained(p["policy"], optimizer=SFTModule),
    ],
)
def test_an_optimizer_is_a_function_of_the_groups_alone(policy, make):
    with pytest.raises(TypeError, match=r"^optimizer=.*function of 1 argument"):
        make(policy)


@pytest.mark.parametrize("wrong", [no_arguments, int, FunctionScorer, "module", [], [5], [""], ""])
@pytest.mark.parametrize("cls", [PPOModule, PolicyGradientModule])
def test_what_cannot_score_is_refused_as_the_reward(policy, cls, wrong):
    wrong = policy["module"] if wrong == "module" else wrong
    with pytest.raises((TypeError, ValueError), match=r"^reward"):
        cls.from_pretrained(policy["policy"], wrong)


def of_scalar(made: dict[str, Any], **wrong: Any) -> Any:
    return load_scalar_model(made["policy"], head="zero", **wrong)


def of_sft(made: dict[str, Any], **wrong: Any) -> Any:
    return SFTModule.from_pretrained(made["policy"], **wrong)


def of_parts(made: dict[str, Any], **wrong: Any) -> Any:
    return SFTModule(**call_of("SFTModule.__init__", made)[1] | wrong)


def arguments(**wrong: Any) -> Any:
    return trainer_arguments("run", **wrong)


def sides(made: dict[str, Any]) -> tuple[Any, ...]:
    return made["module"], made["policy"], made["prompts"]


@pytest.mark.parametrize(
    ("place", "make"),
    [
        (r"callbacks\[0\]=5", lambda p: trainer_arguments("run", callbacks=[5])),
        (r"callbacks=", lambda p: trainer_arguments("run", callbacks=L.Callback)),
        (r"callbacks='x'", lambda p: trainer_arguments("run", callbacks="x")),
        (
            r"also\[1\]=''",
            lambda p: PreferenceDataModule(p["pairs"], None, batch_size=2, also=["a", ""]),
        ),
        (
            r"reward_weights\[1\]=1e\+39",
            lambda p: PPOModule.from_pretrained(
                p["policy"], [length, length], reward_weights=[1, 1e39]
            ),
        ),
        (
            r"weights\[a\]=inf",
            lambda p: WeightedScorer({"a": FunctionScorer(length)}, weights={"a": math.inf}),
        ),
        (r"baseline=5", lambda p: compare(p["module"], 5, p["prompts"], reward=length)),
        (r"reward=5", lambda p: compare(p["module"], p["policy"], p["prompts"], reward=5)),
        (r"source=\[\]", lambda p: PromptDataModule([], None, batch_size=2)),
        (r"prompts=\[\]", lambda p: p["module"].generate([])),
        (r"prompts, the list that was given, row 1", lambda p: p["module"].generate([5])),
        (r"checkpoint_path=5", lambda p: SFTModule.load_from_checkpoint(5)),
        (r"checkpoint_path=", lambda p: DPOModule.load_from_checkpoint(p["prompts"])),
        (r"policy=", lambda p: PPOModule.from_pretrained(Path("not/there"), length)),
        (r"trust_remote_code='no'", lambda p: of_scalar(p, trust_remote_code="no")),
        (r"trust_remote_code=\[0\]", lambda p: of_scalar(p, trust_remote_code=[0])),
        (r"dropout=nan", lambda p: of_scalar(p, dropout=math.nan)),
        (r"scorers\[a\]=.*Scorer", lambda p: WeightedScorer({"a": NoReward})),
        (r"scorers\[\]=''", lambda p: WeightedScorer({"": NoReward()})),
        (r"sources=\[\]", lambda p: JoinedSource([])),
        (r"endings\[0\]=''", lambda p: EndingRule(endings=[""])),
        (r"columns\[prompt\]=''", lambda p: FileSource("x", columns={"prompt": ""})),
        (r"stop_ids\[0\]=-1", lambda p: CachedGenerator([-1], 0)),
        (r"prefill_tokens=-1", lambda p: CachedGenerator([0], 0, prefill_tokens=-1)),
        (r"chat_template='~nosuch/x'", lambda p: of_sft(p, chat_template="~nosuch/x")),
        (r"generator=SFTModule", lambda p: of_sft(p, generator=p["module"])),
        (r"generator\(stop_ids", lambda p: of_sft(p, generator=lambda stop_ids, pad: 5)),
        (r"reward function '\.\./x'", lambda p: FunctionScorer("../x")),
        (r"reward function '\.\.f'", lambda p: FunctionScorer("..f")),
        (
            r"kl_coef_first=3 .*kl_coef_second=2",
            lambda p: ActionSettings(kl_coef_first=3.0, kl_coef_second=2.0),
        ),
        (
            r"kl_high_warn=5 .*kl_high_alarm=1",
            lambda p: DoctorThresholds(kl_high_warn=5.0, kl_high_alarm=1.0),
        ),
        (
            r"eos_alarm_floor=0.95 .*eos_warn_floor=0.9",
            lambda p: DoctorThresholds(eos_alarm_floor=0.95),
        ),
        (r"kl_horizon=5", lambda p: PPOHparams(kl_horizon=5)),
        (r"compute_dtype=torch.int64", lambda p: of_parts(p, compute_dtype=torch.int64)),
        (
            r"1 prompts, 2 completions",
            lambda p: gold_scores(["a"], ["b", "c"], [True]),
        ),
        (r"extra=", lambda p: HttpScorer(url="http://a/", extra={"a": math.nan})),
        (r"extra=", lambda p: HttpScorer(url="http://a/", extra={"a": object()})),
        (r"timeout=1e\+20", lambda p: HttpScorer(url="http://a/", timeout=1e20)),
        (r"api_key_env=''", lambda p: JudgeAnnotator(model="m", api_key_env="")),
        (r"tasks\[0\]=''", lambda p: LmEvalBenchmark([""])),
        (r"harmful\[0\]=''", lambda p: SafetyCheck(PhraseRefusals(), harmful=[""])),
        (r"label=-1", lambda p: TextRewardModelScorer("x", label=-1)),
        (r"chat_template=''", lambda p: TextRewardModelScorer("x", chat_template="")),
        (r"early_stopping: patience='3'", lambda p: arguments(early_stopping={"patience": "3"})),
        (r"early_stopping: patience=-1", lambda p: arguments(early_stopping={"patience": -1})),
        (r"early_stopping: mode='x'", lambda p: arguments(early_stopping={"mode": "x"})),
        (r"early_stopping: .*'a'", lambda p: arguments(early_stopping={"a": 1})),
        (r"checkpoint: .*'a'", lambda p: arguments(checkpoint={"a": 1})),
        (r"doctor: .*'a'", lambda p: arguments(doctor={"a": 1})),
        (r"name='\\x1b", lambda p: arguments(name="\x1b[2J")),
        (r"gold=.*3 arguments", lambda p: compare(*sides(p), gold=no_arguments)),
        (r"gates\[a\] must be", lambda p: compare(*sides(p), gates={"a": 1})),
        (
            r"gold=.*3 arguments",
            lambda p: PeriodicEvaluation(every_n_iterations=1, gold=no_arguments),
        ),
        (r"max_new_tokens=3000", lambda p: p["module"].generate(["w2"], max_new_tokens=3000)),
    ],
)
def test_the_place_of_a_wrong_value_is_named(policy, place, make):
    with pytest.raises((TypeError, ValueError), match=rf"^{place}"):
        make(policy)


def test_what_worked_is_taken(policy):
    weights = {"reward_weights": (1, np.float32(2))}
    made = PPOModule.from_pretrained(policy["policy"], [length, length], **weights)
    assert made.hparams["reward_weights"] == [1.0, 2.0]
    assert PreferenceDataModule(policy["pairs"], None, batch_size=2, also=(policy["pairs"],))
    assert PreferenceDataModule(policy["pairs"], None, batch_size=2, path=policy["pairs"])
    assert len(trainer_arguments("run", callbacks=(L.Callback(),))["callbacks"]) > 2
    assert fitting("names", deque(["a"]), Sequence[str]) == deque(["a"])
    rate = FileSource(policy["prompts"], validation_fraction=torch.tensor(0.5)).validation_fraction
    assert type(rate) is float


@pytest.mark.parametrize("cls", [PPOModule, PolicyGradientModule])
def test_adapters_with_dropout_train_no_policy_on_its_own_samples(cls: Any) -> None:
    with pytest.raises(ValueError, match=r"^lora\.dropout=0\.5"):
        cls.from_pretrained("nowhere", len, lora=LoraHparams(dropout=0.5))


def test_adapters_of_peft_are_named(policy):
    peft = pytest.importorskip("peft")
    with pytest.raises(TypeError, match=r"^lora=.*LoraHparams"):
        SFTModule.from_pretrained(policy["policy"], lora=peft.LoraConfig())


def test_numbers_of_numpy_and_whole_floats_arguments_are_taken() -> None:
    assert fitting("seed", np.int64(3), int) == 3
    assert type(SFTHparams(learning_rate=np.float32(1e-4)).learning_rate) is float
    assert SFTHparams(max_grad_norm=np.int32(2)).max_grad_norm == 2.0
