"""A study of a Hugging Face model with domains: planned by the workflow, and its stages run to the table and figure."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from conftest import SHARED, STUDY, Project
from huggingface_models import save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvstages.analysis.entries import entries
from kvstages.cli import main
from kvstages.files.ledger import sha256
from kvstages.study.configuration import check_study
from kvstages.study.layout import Study

WORDS = ["<unk>", *(f"{letter}{number}" for letter in "ab" for number in range(20))]
PERIODS = {"old": ["18*"], "new": ["1900.txt", "19?1.txt", "19?2.txt"]}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The study's settings: a tiny decoder, and three texts of each of two periods, whose words differ."""
    model, texts = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("texts")
    save(model)
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(model)
    random = np.random.default_rng(2)
    for century, letter in ((18, "a"), (19, "b")):
        for year in range(3):
            words = [f"{letter}{number}" for number in random.integers(20, size=40)]
            (texts / f"{century}{year:02d}.txt").write_text(" ".join(words))

    def pinned(folder: Path) -> dict:
        files = [{"path": path.name, "sha256": sha256(path)} for path in sorted(folder.iterdir())]
        return {"source": "local", "location": str(folder), "files": files}

    drawn = {"documents": 1, "blocks": 2, "seed": 0}
    return {
        **{key: value for key, value in STUDY.items() if key not in ("adaptation", "artifacts")},
        **{"layers": 3, "heads": 2, "sensitivity": "gradients", "probes": 2, "unit": "keys-values"},
        "model": {"family": "huggingface", **pinned(model)},
        "text": pinned(texts),
        "windows": {"calibration": drawn, "validation": drawn},
        "domains": {
            **{"texts": PERIODS, "lengths": [4, 16], "probes": 2, "budgets": ["8bits"]},
            **{"calibration": drawn, "validation": {**drawn, "documents": 2}},
        },
    }


def test_a_study_with_domains_runs_to_its_table_and_figure(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstages.stats.bootstrap.RESAMPLES", 100)
    project = Project(tmp_path)
    project.configure(settings)
    study = Study("small", settings, SHARED, entries("kvstages.figures"), entries("kvstages.tables"))
    plan = project.run("--dry-run", "--printshellcmds", *study.domain_joint_files).splitlines()
    lines = [line.partition("kvstages ") for line in plan]
    stages = [
        shlex.split(words.partition(" 2> ")[0]) for before, _, words in lines if before in ("", "Shell command: ")
    ]
    stages = [stage for stage in stages if stage]
    (drawn,) = [words for words in study.figure_commands if words[1] == "domains"]
    (written,) = [words for words in study.table_commands if words[1] == "domains"]
    monkeypatch.chdir(tmp_path)
    for stage in [*stages, drawn, written]:
        result = CliRunner().invoke(main, list(map(str, stage)))
        assert result.exit_code == 0, f"{shlex.join(map(str, stage))}\n{result.output}{result.exception!r}"
    places = pd.read_csv("results/small/domains/windows.csv")
    for name, own in places.groupby("window"):
        _, domain, length = name.split("-")
        assert set(own["document"].str[:2]) == {{"old": "18", "new": "19"}[domain]}
        assert len(own) == (8 if length == "4" else 2)
        other = places[places["window"] == name.replace("validation", "calibration")]
        assert name.startswith("calibration") or not set(own["document"]) & set(other["document"])
    table = pd.read_csv("results/small/tables/domains.csv")
    assert len(table) == 16 and table["bytes"].nunique() == 1 and (table["mean_kl"] > 0).all()
    own = (table["calibrated_domain"] == table["domain"]) & (table["calibrated_length"] == table["length"])
    assert own.sum() == 4 and (table["ratio"][own] == 1).all()
    means = table.set_index(["domain", "length", "calibrated_domain", "calibrated_length"])["mean_kl"]
    expected = means["old", 4, "new", 16] / means["old", 4, "old", 4]
    ratios = table.set_index(["domain", "length", "calibrated_domain", "calibrated_length"])["ratio"]
    assert ratios["old", 4, "new", 16] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"texts": {"old": ["17*"]}},
            "domains.texts.old: no document is called 17*; there are 6, the first is 1800.txt",
        ),
        ({"lengths": [6, 16]}, "domains.lengths[0]: 6, expected a divisor of the longest, 16"),
    ],
)
def test_domains_that_the_texts_lack_are_refused_before_anything_runs(settings: dict, change: dict, said: str) -> None:
    check_study("mine", settings)
    with pytest.raises(ValueError) as caught:
        check_study("mine", {**settings, "domains": {**settings["domains"], **change}})
    assert str(caught.value) == f"config/studies/mine.yaml: {said}"
