"""The tables: numbers in full precision in the CSV, footnotes and published columns in the HTML, and errors."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from gappy import write_gappy
from made_up import sensitivity_table
from published_study import FLOOR, PUBLISHED, table_arguments, write_study

from kvstages.analysis.published import published_adaptation
from kvstages.cli import main
from kvstages.tables.equal_bytes import p_value
from kvstages.tables.page import count, decimal, divergence, percent

BYTES = "persistent payload plus the scales of one cache of 64 tokens at batch 1; transient reconstruction"
NOT_FASTER = "Less storage is not a speed-up"
PROXY = "The proxy is a calibration proxy"
SETTINGS = "token-by-token execution, computed in bfloat16"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def make(name: str, study: Path, output: Path, *more: object) -> tuple[pd.DataFrame, str]:
    words = ["table", name, *table_arguments(name, study), "--output", str(output), *map(str, more)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return pd.read_csv(output.with_suffix(".csv")), output.read_text()


@pytest.mark.parametrize("name", ["results", "divergence", "adaptation", "sensitivity-summary"])
def test_title_of_the_study(name, study, tmp_path):
    _, page = make(name, study, tmp_path / "table.html", "--title", "Speeches & more")
    assert "<title>Speeches &amp; more: " in page
    assert "<h1>Speeches &amp; more: " in page


@pytest.mark.parametrize("name", ["results", "sensitivity-summary"])
def test_footnotes_and_the_same_bytes_again(name, study, tmp_path):
    _, page = make(name, study, tmp_path / "table.html")
    for note in (BYTES, NOT_FASTER, SETTINGS):
        assert note in page
    assert PROXY in page
    assert "published" not in page.split("</style>")[1]
    again = tmp_path / "again.html"
    make(name, study, again)
    assert again.read_bytes() == (tmp_path / "table.html").read_bytes()
    assert again.with_suffix(".csv").read_bytes() == (tmp_path / "table.csv").read_bytes()


def test_results(study, tmp_path):
    table, page = make("results", study, tmp_path / "results.html", "--published", PUBLISHED)
    assert table["policy"].tolist()[:4] == ["bf16", "int8", "int4", "greedy-0.01"]
    mixed = table.set_index("policy").loc["greedy-0.01"]
    assert mixed[["tensors_bf16", "tensors_int8", "tensors_int4", "total_bytes"]].tolist() == [14, 38, 140, 579840]
    assert not {"tensors_int3", "tensors_int2"} & set(table)
    assert mixed["proxy"] == 0.009985672175389482
    for name in (
        "proxy", "mean_kl", "p50_kl", "p95_kl", "p99_kl", "max_kl", "agreement", "cross_entropy", "perplexity",
        "max_logit_deviation", "first_disagreement_mean", "sequences_with_disagreement", "total_bytes", "compression",
    ):  # fmt: skip
        pd.testing.assert_series_equal(table[f"published_{name}"], table[name], check_names=False)
    assert '<td>579,840</td><td class="published">579,840</td>' in page
    assert '0.001528<span class="interval">[0.001406, 0.001665]</span>' in page
    assert "window validation, 32 blocks of 64 tokens, 2,048 positions (2,016 targets of the cross entropy)" in page


def test_results_without_a_published_counterpart(study, tmp_path):
    place = tmp_path / "policies" / "greedy-0.02"
    place.mkdir(parents=True)
    for name in ("evaluation.json", "policy.json"):
        record = json.loads((study / "policies/greedy-0.01" / name).read_text()) | {"policy": "greedy-0.02"}
        (place / name).write_text(json.dumps(record))
    words = ["table", "results", place / "evaluation.json", study / "policies/bf16/evaluation.json"]
    words += ["--output", tmp_path / "r.html", "--published", PUBLISHED]
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 0, result.output
    row = (tmp_path / "r.csv").read_text().splitlines()[2]
    assert row.startswith("greedy-0.02,14,38,140,0.009985672175389482,,")
    assert ",579840,,2.7125827814569536," in row


def test_divergence(study, tmp_path):
    table, page = make("divergence", study, tmp_path / "divergence.html")
    assert table["policy"].tolist()[:4] == ["bf16", "int8", "int4", "greedy-0.01"]
    rows = table.set_index("policy")
    record = json.loads((study / "policies/int4/evaluation.json").read_text())
    for name in ("mean_kl", "p0_1_reverse_kl", "perplexity_ratio_error", "min_delta_p", "agreement_low"):
        assert rows.loc["int4", name] == record[name]
    assert rows.loc["bf16", "perplexity_ratio"] == 1
    for words in (
        "KL(policy || reference) (nats)", "KL(reference || policy) (nats)", "<th>99.9 %</th>", "<th>0.1 %</th>",
        "Δp of the true next token, policy minus reference (probability)", "not per cent", SETTINGS,
        "Same most likely token (share of positions)", "one standard error over blocks",
    ):  # fmt: skip
        assert words in page
    other = tmp_path / "again.html"
    make("divergence", study, other)
    assert other.read_bytes() == (tmp_path / "divergence.html").read_bytes()


def test_divergence_of_a_single_block_has_no_errors(study, tmp_path):
    record = json.loads((study / "policies/int8/evaluation.json").read_text())
    lonely = {name: None if name.endswith("_error") else value for name, value in record.items()}
    (tmp_path / "evaluation.json").write_text(json.dumps(lonely))
    words = ["table", "divergence", str(tmp_path / "evaluation.json"), "--output", str(tmp_path / "d.html")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert pd.read_csv(tmp_path / "d.csv")["mean_kl_error"].isna().all()
    assert "<td>–</td>" in (tmp_path / "d.html").read_text()
    del record["p5_kl"]
    (tmp_path / "evaluation.json").write_text(json.dumps(record))
    said = failure("divergence", tmp_path / "evaluation.json", "--output", tmp_path / "d.html")
    assert "evaluation.json: key 'p5_kl' is missing" in said


def test_adaptation(study, tmp_path):
    table, page = make("adaptation", study, tmp_path / "adaptation.html", "--published", "gpt2-nano")
    assert sorted(table[["arm", "against", "policy"]].to_numpy().tolist()) == [
        ["published", "original", "greedy-0.01"],
        ["published", "published-control", "greedy-0.01"],
        ["published-control", "original", "greedy-0.01"],
    ]
    own, other = (
        [
            pd.read_csv(path).groupby("policy")["mean_kl"].mean()
            for path in sorted(study.glob(f"adaptation/{arm}/*/evaluation.csv"))
        ]
        for arm in ("published", "published-control")
    )
    added, of_control = ([each["greedy-0.01"] - each["bf16"] for each in models] for models in (own, other))
    row = table[table["against"] == "published-control"].iloc[0]
    assert row["kl_effect"] == pytest.approx(np.mean(added) - of_control[0])
    assert row["kl_effect_low"] < row["kl_effect"] < row["kl_effect_high"] and row["seeds"] == 3
    assert row["removed"] == pytest.approx(-row["kl_effect"] / of_control[0])
    seeds = published_adaptation(PUBLISHED).values()
    published = np.mean([seed["policies"]["greedy-0.01"]["mean_kl"] for seed in seeds])
    assert row["published_mean_kl"] == pytest.approx(published) and round(row["published_mean_kl"], 6) == 0.001515
    assert table.loc[table["arm"] == "published-control", "published_mean_kl"].isna().all()
    assert "Beside a control of the same steps, training" in page and "1.30 %" in page


def test_settings_of_adaptation(study, tmp_path):
    table, page = make("adaptation-settings", study, tmp_path / "settings.html")
    assert table["arm"].tolist() == ["published"] * 3 and table["chosen"].tolist() == [0, 0, 1]
    assert page.count('<tr class="strong">') == 1


def test_sensitivity_summary_shows_the_published_weakness(study, tmp_path):
    table, page = make("sensitivity-summary", study, tmp_path / "s.html", "--published", PUBLISHED)
    assert table[["source", "part"]].drop_duplicates().to_numpy().tolist() == [["measured-bfloat16", "kv"]]
    rows = table.set_index("precision")
    assert rows["below_floor"].tolist() == [38, 11]
    assert rows["median_floor"].tolist() == [FLOOR] * 2 and rows["median_bf16_step"].tolist() == [2 * FLOOR] * 2
    assert round(rows.loc["int8", "correlation_with_layer"], 2) == -0.98
    assert round(rows.loc["int4", "median_ratio_to_int8"], 1) == 1.9
    assert rows.loc["int4", "theoretical_ratio_to_int8"] == (127 / 7) ** 2
    assert round(rows.loc["int8", "sum_over_joint"]) == 31
    assert rows["published_sum"].tolist() == rows["sum"].tolist()
    assert "−0.98" in page


def test_sensitivity_summary_of_two_sources_and_of_parts(study, tmp_path):
    wide = tmp_path / "measured-float32.csv"
    write_gappy(wide, sensitivity_table(parts=("k", "v"), precisions=("int8", "int2"), floor=None))
    table, page = make("sensitivity-summary", study, tmp_path / "s.html", "--sensitivity", wide)
    assert table[["source", "part", "precision"]].to_numpy().tolist() == [
        ["measured-bfloat16", "kv", "int8"], ["measured-bfloat16", "kv", "int4"],
        ["measured-float32", "k", "int8"], ["measured-float32", "k", "int2"],
        ["measured-float32", "v", "int8"], ["measured-float32", "v", "int2"],
    ]  # fmt: skip
    keys, values = (table[(table["part"] == part) & (table["precision"] == "int8")].iloc[0] for part in "kv")
    scores = pd.read_csv(wide)
    own = scores[(scores["part"] == "k") & (scores["precision"] == "int8")]["mean_kl"]
    assert keys["sum"] == pytest.approx(own.sum(), rel=1e-12) and keys["median"] == pytest.approx(own.median())
    # No policy quantizes keys alone, and none was measured in FP32.
    assert values["sum"] != keys["sum"] and table.loc[2:, ["joint_mean_kl", "sum_over_joint"]].isna().all(axis=None)
    assert table.loc[:1, ["joint_mean_kl", "sum_over_joint"]].notna().all(axis=None)
    assert table.loc[2:, ["median_floor", "below_floor", "median_bf16_step"]].isna().all(axis=None)
    assert table.loc[3, "theoretical_ratio_to_int8"] == 127**2
    assert "measured-float32: one-pass execution, computed in float32, 8 blocks" in page


COMPARISON = ["equal-bytes", "frontier", "proxy-joint"]


@pytest.mark.parametrize("name", COMPARISON)
def test_tables_of_the_comparison_say_what_they_show_and_the_same_again(name, study, tmp_path, monkeypatch):
    monkeypatch.setattr("kvstages.stats.bootstrap.RESAMPLES", 100)
    _, page = make(name, study, tmp_path / "table.html", "--title", "Speeches")
    for note in (
        "<h1>Speeches: ", PROXY, NOT_FASTER, "the scales of one cache of one block at batch 1",
        "Measured jointly with one-pass execution, computed in float32", "teacher-forced; 8 blocks of the window valid",
    ):  # fmt: skip
        assert note in page
    make(name, study, tmp_path / "again.html", "--title", "Speeches")
    for suffix in (".html", ".csv"):
        assert (tmp_path / f"again{suffix}").read_bytes() == (tmp_path / f"table{suffix}").read_bytes()


def test_equal_bytes(study, tmp_path):
    table, page = make("equal-bytes", study, tmp_path / "t.html")
    assert table[["budget", "compute_dtype"]].drop_duplicates().to_numpy().tolist() == [
        [budget, dtype] for budget in (0.01, 0.04) for dtype in ("float32", "bfloat16")
    ]
    own = table[(table["budget"] == 0.01) & (table["compute_dtype"] == "float32")].set_index("policy")
    exact = own.loc["exact"]
    assert 0.2 < exact["kl_reduction"] < 0.3 and exact["kl_reduction_low"] > 0 and exact["drawn_less_proxy"] == 0
    assert "<caption>Budget 0.01 of the published recipe: which order holds in which arithmetic</caption>" in page
    assert '<tr class="strong"><td class="text">published</td>' in page
    pairs = [
        "{}, {}".format(*(decimal(1)(100 * exact[f"kl_reduction_{kind}{end}"]) for end in ("low", "high")))
        for kind in ("", "documents_")
    ]
    said = f'{decimal(1)(100 * exact["kl_reduction"])} %<span class="interval">[{pairs[0]} %]</span>'
    assert f'{said}<span class="interval">{{{pairs[1]} %}}</span>' in page
    for header in ("KL, FP32 (nats)", "KL, BF16 (nats)", "excess KL, FP32 (nats)", "excess KL, BF16 (nats)"):
        assert f"<th>{header}</th>" in page
    assert '<td class="text">1 / 1 / 1 / 1</td>' in page and '<td class="text">uniform INT8</td>' in page
    assert "<td>0.007</td>" in page
    assert "exact-split-low: exact, scores measured-float32, unit keys-values, int8 int4 int3 int2" in page
    assert "<caption>Joint KL of the random policies (nats)</caption>" in page
    assert "bootstrap over the 4 documents" in page


def test_frontier(study, tmp_path):
    table, page = make("frontier", study, tmp_path / "t.html")
    assert len(table) == 2 * (4 + 3 * 6)
    own = table[table["compute_dtype"] == "float32"]
    assert own[own["recipe"] == "uniform"]["policy"].tolist() == ["bf16", "int8", "int4", "int2"]
    assert "<caption>exact-split-low, BF16: exact, scores measured-float32, unit keys-values, int8 int4 int3" in page
    assert (table["compression"] == 393_216 / table["bytes"]).all()
    assert "<caption>uniform, FP32</caption>" in page and '<td class="text">int2</td>' in page
    # Uniform INT8 and the published recipe's policy of as many bytes.
    assert own.set_index("policy").loc["int8", "kl_reduction"] > 0.5


def test_proxy_joint(study, tmp_path):
    table, page = make("proxy-joint", study, tmp_path / "t.html")
    every = table[table["proxies"] == "all"].set_index("sensitivity")
    assert every.index.tolist() == ["measured-float32", "measured-bfloat16"]
    assert every.loc["measured-float32", "rank_correlation"] > 0.9
    random = table["proxies"].str.startswith("random")
    parts = table[(table["proxies"] != "all") & ~random].groupby("sensitivity")["policies"].sum()
    assert table[random]["proxies"].tolist() == ["random, 0.01", "random, 0.04"]
    assert table[random]["policies"].tolist() == [12, 12]
    assert parts.to_dict() == every["policies"].to_dict()
    assert "<caption>Joint KL and proxy</caption>" in page


@pytest.mark.parametrize("typed", ["AT&T <3", "AT&amp;T &lt;3"])
def test_a_title_may_be_written_in_html(typed, study, tmp_path):
    words = ["table", "results", *table_arguments("results", study), "--output", str(tmp_path / "r.html")]
    assert CliRunner().invoke(main, [*words, "--title", typed]).exit_code == 0
    assert "<h1>AT&amp;T &lt;3: results of every policy</h1>" in (tmp_path / "r.html").read_text()


def failure(*words: object) -> str:
    result = CliRunner().invoke(main, ["table", *map(str, words)])
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_errors_name_the_file(study, tmp_path):
    lonely = tmp_path / "evaluation.json"
    lonely.write_text((study / "policies/int8/evaluation.json").read_text())
    assert f"{tmp_path}/policy.json" in failure("results", lonely, "--output", tmp_path / "r.html")
    record = json.loads(lonely.read_text())
    del record["perplexity"]
    lonely.write_text(json.dumps(record))
    said = failure("results", lonely, "--output", tmp_path / "r.html")
    assert "evaluation.json: key 'perplexity' is missing" in said
    words = table_arguments("results", study)
    said = failure("results", *words, "--output", tmp_path / "r.csv")
    assert "r.csv: a table's output ends in .html" in said
    said = failure("results", *words, "--output", tmp_path / "r.html", "--published", tmp_path)
    assert f"{tmp_path}/validation.json" in said
    said = failure("results", *words, "--output", tmp_path / "r.html", "--published", "nano")
    assert "published figures 'nano': no such folder, and none that ships with the project (gpt2-nano)" in said
    assert not (tmp_path / "r.html").exists()


def test_how_p_values_are_written():
    assert [p_value(value) for value in (1.0, 0.0314, 0.001, 3e-9)] == ["1.000", "0.031", "0.001", "< 0.001"]


def test_how_numbers_are_written():
    assert [divergence(value) for value in (0, 0.001527944, 9.2613e-6, 1.0, -0.25, -9.2613e-16)] == [
        "0", "0.001528", "9.261 × 10⁻⁶", "1.000", "−0.2500", "−9.261 × 10⁻¹⁶",
    ]  # fmt: skip
    assert [percent(0.97852), count(1572864.0), count(44 / 3), decimal(2)(-0.984)] == [
        "97.85 %", "1,572,864", "14.7", "−0.98",
    ]  # fmt: skip


def test_domains(study, tmp_path):
    table, page = make("domains", study, tmp_path / "domains.html")
    assert table["budget"].unique().tolist() == ["5bits", "10bits"] and len(table) == 2 * 4 * 4
    rows = table.set_index(["budget", "calibrated_domain", "calibrated_length", "domain", "length"])
    joint = pd.read_csv(study / "domains" / "letters" / "64" / "joint.csv").groupby("policy")["mean_kl"].mean()
    other = rows.loc["5bits", "speeches", 256, "letters", 64]
    assert other["mean_kl"] == pytest.approx(joint["speeches-256-5bits"])
    assert other["ratio"] == pytest.approx(joint["speeches-256-5bits"] / joint["letters-64-5bits"])
    assert other["bits"] == 5 and (other["blocks"], other["documents"]) == (8, 4)
    assert other["mean_kl_documents_low"] < other["mean_kl"] < other["mean_kl_documents_high"]
    # All blocks have the same made-up ratio, so resampling cannot move it.
    assert other[["ratio_low", "ratio_documents_high"]].tolist() == pytest.approx([1.4, 1.4])
    own = rows.loc["5bits", "letters", 64, "letters", 64]
    assert own["ratio"] == 1 and np.isnan(own["ratio_low"])
    assert page.count("<caption>") == 4 and page.index("policies of 5bits") < page.index("policies of 10bits")
    for words in ("<th>on speeches, blocks of 256</th>", "No interval covers other calibration blocks", NOT_FASTER):
        assert words in page


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"window": "validation"}, "joint.csv: 'validation', expected DOMAIN-LENGTH, such as letters-64"),
        ({"sensitivity": "gradients"}, "joint.csv: 'gradients', expected DOMAIN-LENGTH, such as letters-64"),
        ({"policy": "letters-64"}, "joint.csv: policy letters-64, expected letters-64-BUDGET, as -5bits"),
        ({"window": "validation-poems-64"}, "no policy of 5bits that was calibrated on poems, blocks of 64"),
    ],
)
def test_what_was_not_measured_on_a_domain_is_no_part_of_its_table(study, tmp_path, changed, said):
    table = pd.read_csv(study / "domains" / "letters" / "64" / "joint.csv")
    write_gappy(tmp_path / "joint.csv", table[table["policy"] == "letters-64-5bits"].assign(**changed))
    assert said in failure("domains", tmp_path / "joint.csv", "--output", tmp_path / "d.html")
    assert not (tmp_path / "d.html").exists()
