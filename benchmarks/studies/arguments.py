"""Which of two arguments is more convincing: one debate held out at a time.

    python -m benchmarks.studies.arguments train:dataset.path=FOLDER

A reward model of SmolLM2-135M with LoRA on UKPConvArg1 (Habernal and Gurevych 2016, table 2: SVM
0.78, BiLSTM 0.76, means over 32 sides of 16 debates; here six debates, both sides of one held out
at a time). Without the hub `train:artifacts.sft=FOLDER`. Takes up to 17 GiB.
"""

from __future__ import annotations

from benchmarks.studies.run import Row, Study, main

DEBATES = {
    "dataset.source.held_out": [
        [name]
        for name in (
            "ban-plastic-water-bottles",
            "firefox-vs-internet-explorer",
            "india-has-the-potential-to-lead-the-world",
            "is-the-school-uniform-a-good-or-bad-idea",
            "personal-pursuit-or-advancing-the-common-good",
            "william-farquhar-ought-to-be-honoured-as-the-rightful-founder-of-singapore",
        )
    ]
}
PUBLISHED = {"val/accuracy/subset/strict": 0.78}
STUDY = Study(
    "arguments",
    {
        "all_pairs": Row(
            ["+experiment=reward_smollm2_arguments"], vary=DEBATES, published=PUBLISHED
        ),
        "balanced": Row(  # as many pairs whose shorter argument was chosen as of the others
            ["+experiment=reward_smollm2_arguments", "data.balance_length=true"],
            vary=DEBATES,
            published=PUBLISHED,
        ),
    },
    measure=(
        "val/accuracy/subset/strict",
        "val/longer_wins_accuracy/subset/strict",
        "val/accuracy_length_matched/subset/strict",
        "val/accuracy_chosen_shorter/subset/strict",
        "val/accuracy",
    ),
    shared={
        "train": [
            "logger=none",
            "gates=none",
            "lora=lora",
            "trainer.precision=32-true",
            "module.reward.learning_rate=5.0e-4",
            "module.reward.micro_batch_size=null",
            "data.group_by_prompt=true",  # a response of many pairs is read once
            "data.batch_size=256",
            "data.num_epochs=null",
            "data.num_iterations=31",
        ]
    },
)

if __name__ == "__main__":
    main(STUDY)
