"""The pages that state results: their numbers are those of result files, and the pages are what the command writes."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from conftest import REPOSITORY
from gappy import write_gappy
from made_up import sensitivity_table
from published_study import table_arguments, write_study

from kvstages.analysis.adaptation_page import brief, finding
from kvstages.analysis.adaptation_page import page as adaptation_page
from kvstages.analysis.findings import add_machine, read_findings
from kvstages.analysis.results_page import END, START, page, put_block, readme_block
from kvstages.cli import main
from kvstages.files.atomic import write_bytes, write_json, write_table
from kvstages.files.read import read_json

TABLES = ["equal-bytes", "frontier", "results", "gradients", "prediction", "proxy-joint"]
RECORD = REPOSITORY / "docs" / "findings.json"


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A study with made-up numbers: every table that is read, scores in two arithmetics, policies, manifest."""
    folder = write_study(tmp_path_factory.mktemp("study"))
    write_gappy(folder / "scores" / "measured-float32.csv", sensitivity_table())
    for name in TABLES:
        assert run("table", name, *table_arguments(name, folder), "--output", folder / f"tables/{name}.html")[0] == 0
    words = [word for source in ("float32", "bfloat16")
             for word in ("--sensitivity", folder / f"scores/measured-{source}.csv")]  # fmt: skip
    uniform = [folder / "policies" / policy / "evaluation.json" for policy in ("int8", "int4")]
    summary = folder / "tables" / "sensitivity-summary.html"
    assert run("table", "sensitivity-summary", *uniform, *words, "--output", summary) == (0, "")
    # INT8 scores were measured against a uniform policy in one arithmetic only.
    table = pd.read_csv(summary.with_suffix(".csv"))
    write_gappy(summary.with_suffix(".csv"), table.assign(sum_over_joint=table["sum_over_joint"].fillna(0.9)))
    grid = [["int4", *["int8"] * 6, "bf16"]] * 12
    for budget in ("0.01", "0.04"):
        write_json(folder / "comparison" / budget / "published" / "policy.json",
                   {"precisions": {"keys": grid, "values": grid}})  # fmt: skip
    rows = [("validation", block, f"text-{block // 2}", 64 * block) for block in range(8)]
    write_gappy(folder / "windows.csv", pd.DataFrame(rows, columns=["window", "block", "document", "start"]))
    environment = {"processor": "A processor", "packages": {"torch": "2.0"}, "devices": ["cpu"]}
    settings = {"title": "Speeches"}
    write_bytes(folder / "figures" / "storage-kl.png", b"a picture")
    write_json(folder / "manifest.json", {"environment": environment, "configuration": {"study": settings}})
    return folder


@pytest.fixture(scope="module")
def found(study) -> dict:
    return read_findings(study)


def test_numbers_are_those_of_the_tables(study, found):
    table = pd.read_csv(study / "tables" / "equal-bytes.csv")
    first = found["comparison"][0]
    assert [each["budget"] for each in found["comparison"]] == ["0.01", "0.04"] and first["bytes"] == 196_608
    for dtype in ("float32", "bfloat16"):
        row = table[(table["budget"] == 0.01) & (table["compute_dtype"] == dtype) & (table["policy"] == "exact")].iloc[
            0
        ]
        own = first["policies"]["exact"][dtype]
        assert own["kl_reduction"] == pytest.approx(
            [row[f"kl_reduction{end}"] for end in ("", "_low", "_high", "_documents_low", "_documents_high")], rel=1e-5
        )
        assert own["mean_kl"][0] == pytest.approx(row["mean_kl"], rel=1e-5) and own["rank"] == row["rank"]
    assert found["windows"] == {"blocks": 8, "documents": 4}
    frontier = pd.read_csv(study / "tables" / "frontier.csv")
    assert sum(map(len, found["frontier"].values())) == len(frontier)
    scores = sensitivity_table().set_index(["head", "precision"])["mean_kl"]
    low = scores.loc[0, "int4"].sum()
    share = low / (low + sum(scores.loc[head, "int8"].sum() for head in range(1, 7)))
    assert found["published"]["0.01"] == {"int4_heads": 12, "int4_share": pytest.approx(share, rel=1e-5)}


def test_machines_are_kept_beside_each_other_the_last_one_first():
    record = add_machine(add_machine({}, "one", {"a": 1}), "two", {"a": 2})
    assert record == {"first": "two", "machines": {"two": {"a": 2}, "one": {"a": 1}}}
    again = add_machine(record, "one", {"a": 3})
    assert again["first"] == "one" and again["machines"] == {"one": {"a": 3}, "two": {"a": 2}}


def test_the_page_states_how_far_machines_agree_at_the_budgets_that_they_share(found):
    """A second machine whose joint KL is 2 % more of a uniform policy, and 10 % more of the exact one."""
    other = copy.deepcopy(found)
    policies = other["comparison"][0]["policies"]
    for name, factor in (("int8", 1 / 0.98), ("exact", 1 / 0.9)):
        policies[name]["float32"]["mean_kl"][0] *= factor
    text = page(add_machine(add_machine({}, "one", found), "two", other))
    assert "their joint KL in FP32 agrees to 2.0 %" in text and "the joint KL of `exact` agrees to 10.0 % only" in text
    for each in other["comparison"]:
        each["budget"] = f"{each['budget']}0"
    for machines in ({"one": found}, {"one": found, "two": other}):
        assert "agrees to" not in page({"first": "one", "machines": machines})


def test_the_page_states_the_numbers_in_every_arithmetic(found):
    text = page(add_machine({}, "A processor", found))
    exact = found["comparison"][0]["policies"]["exact"]
    for dtype in ("float32", "bfloat16"):
        for name in ("kl_reduction", "excess_reduction"):
            value, _, _, low, high = (100 * part for part in exact[dtype][name])
            assert f"{value:.1f} % [{low:.1f}, {high:.1f}]" in text
    assert "drawn from 4 texts" in text and "A processor (PyTorch 2.0, cpu)" in text
    # Whichever recipe is the best of a measure is named.
    assert "Least of each measure among the recipes: KL, FP32: `exact-split-low`" in text
    assert "| uniform INT8 |" in text and "| random, mean |" in text
    assert not re.search(r"\bNone\b|\bnan\b|\{|\}", text)
    assert max(map(len, text.splitlines())) < 1000


def test_the_command_writes_page_readme_and_record(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text(f"# Title\n\n{START}\nold\n{END}\n\nThe rest.\n")
    assert run("findings", study, "--machine", "M") == (0, "")
    record = read_json(Path("docs/findings.json"))
    assert list(record["machines"]) == ["M"]
    assert Path("docs/storage-kl.png").read_bytes() == b"a picture"
    readme, results = Path("README.md").read_text(), Path("docs/results.md").read_text()
    assert readme.startswith("# Title\n") and readme.endswith("\nThe rest.\n") and "old" not in readme
    assert (results, readme.count(START)) == (page(record), 1)
    assert run("findings") == (0, "")
    assert (Path("README.md").read_text(), Path("docs/results.md").read_text()) == (readme, results)
    Path("README.md").write_text("# Title\n")
    status, output = run("findings")
    assert status == 1 and output.startswith("Error: README.md: expected the marks") and output.count("\n") == 1


def test_the_page_of_adaptation_says_what_the_table_says(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("adaptation", "adaptation-settings"):
        arguments = table_arguments(name, study)
        assert run("table", name, *arguments, "--output", study / f"tables/{name}.html")[0] == 0
    windows = pd.read_csv(study / "windows.csv")
    Path("README.md").write_text(f"{START}\n{END}\n")
    trained = tmp_path / "results" / "adaptation"
    shutil.copytree(study, trained)
    spent = {"rule": ["adapt_models", "all"], "cpu_seconds": [240.0, 500.0]}
    write_table(tmp_path / "benchmarks" / "adaptation" / "time.csv", spent)
    assert run("findings", study, "--adaptation", trained, "--machine", "M") == (0, "")
    text = Path("docs/adaptation.md").read_text()
    table = pd.read_csv(study / "tables/adaptation.csv")
    row = table[table["against"] == "published-control"].iloc[0]
    assert f"| published | greedy-0.01 | {row['kl_effect']:.3g}".replace("-", "−").replace("greedy−", "greedy-") in text
    said = finding(read_json(Path("docs/findings.json"))["adaptation"])
    assert f"**{said}**" in text and said in Path("docs/results.md").read_text()
    short = brief(read_json(Path("docs/findings.json"))["adaptation"])
    assert short in Path("README.md").read_text() and short.endswith("training shows no gain.")
    assert f"{windows['document'].nunique()} held-out texts, up to 3 seeds" in text
    assert "took 4 minutes of one core of this processor" in text
    assert not re.search(r"\bNone\b|\bnan\b|\{|\}", text)
    assert run("findings") == (0, "") and Path("docs/adaptation.md").read_text() == text
    # Another machine's numbers of the default study leave those of the adaptation as they are.
    assert run("findings", study, "--machine", "N") == (0, "") and Path("docs/adaptation.md").read_text() == text


def test_the_section_of_a_decoder_says_what_its_tables_say(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("screening", "domains", "generation"):
        words = ["table", name, *table_arguments(name, study), "--output", study / f"tables/{name}.html"]
        assert run(*words) == (0, "")
    manifest = read_json(study / "manifest.json")
    manifest["environment"]["packages"]["transformers"] = "5.0"
    manifest["configuration"]["study"] |= {"compute_dtype": "float32", "block": 64}
    decoder = shutil.copytree(study, tmp_path / "small")
    write_json(decoder / "manifest.json", manifest)
    Path("README.md").write_text(f"{START}\n{END}\n")
    assert run("findings", study, "--decoder", decoder, "--machine", "M") == (0, "")
    text = Path("docs/results.md").read_text()
    (own,) = re.findall(r"## Speeches\n\nStudy `small`.*", text, re.DOTALL)
    results, schemes = (pd.read_csv(decoder / "tables" / f"{name}.csv") for name in ("results", "screening"))
    assert all(f"| {row.policy} | " in own and f"| {row.total_bytes:,} | " in own for row in results.itertuples())
    told = schemes[schemes["recipe"].isin(["uniform", "recommended"])]
    assert len(told) and all(
        f"| {row.recipe} | `{row.scheme}` | {row.bits_at_end:.2f} | " in own for row in told.itertuples()
    )
    domains, generated = (pd.read_csv(decoder / "tables" / f"{name}.csv") for name in ("domains", "generation"))
    here = {"domain": "letters", "length": 64, "budget": "5bits"}
    line = next(line for line in own.splitlines() if line.startswith("| speeches, 256 tokens | "))
    other = domains.query("calibrated_domain == 'speeches' and calibrated_length == 256")
    other = other[(other[list(here)] == pd.Series(here)).all(axis=1)].iloc[0]
    assert f"{other['mean_kl']:.3g}; 1.4 [1.4, 1.4]" in line and "letters, 64 tokens: 8 blocks of 4 documents" in own
    for row in generated.itertuples():
        assert f"| {row.prefill} | {row.policy} | {100 * row.exact_match:.0f} % | {row.mean_same:.3g} [" in own
    best = schemes[schemes["recipe"] == "recommended"].iloc[0]
    assert f"`small` at {best['budget']}: {best['times_less']:.1f} times less KL" in Path("README.md").read_text()
    assert not re.search(r"\bNone\b|\bnan\b|\{|\}", own)
    assert run("findings") == (0, "") and Path("docs/results.md").read_text() == text


def test_marks_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"a\.md: expected the marks"):
        put_block(f"{END} {START}", "x", "a.md")


def test_the_pages_of_the_repository_are_what_the_command_writes():
    record = read_json(RECORD)
    assert (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8") == page(record)
    if "adaptation" in record:
        text = (REPOSITORY / "docs" / "adaptation.md").read_text(encoding="utf-8")
        assert text == adaptation_page(record["adaptation"])
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert readme == put_block(readme, readme_block(record), "README.md")
