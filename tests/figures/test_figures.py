"""Every figure: what it writes, that its CSV is what the inputs hold and all that is drawn, and its errors."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from gappy import write_gappy
from made_up import policy_rows, sensitivity_table, split_policy_file, write_set
from matplotlib.figure import Figure
from published_study import FLOOR, PUBLISHED, SENSITIVITY, figure_arguments, write_study

from kvstages.analysis.published import published_sensitivities, published_validation
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import BITS
from kvstages.cli import main
from kvstages.figures import (
    adaptation,
    adaptation_curves,
    allocation,
    domains,
    equal_bytes,
    floor,
    frontier,
    frontier_reduction,
    generation,
    gradients,
    greedy_path,
    kl_by_position,
    kl_distribution,
    proxy_joint,
    screening,
    sensitivity,
    shades,
    storage_kl,
)
from kvstages.figures.policies import policies_label
from kvstages.figures.style import legend_below, style, write_figure
from kvstages.scores.columns import SENSITIVITY_COLUMNS

DRAW = {
    "sensitivity": sensitivity.draw,
    "allocation": allocation.draw,
    "greedy-path": greedy_path.draw,
    "storage-kl": storage_kl.draw,
    "kl-by-position": kl_by_position.draw,
    "kl-distribution": kl_distribution.draw,
    "adaptation-curves": adaptation_curves.draw,
    "adaptation": adaptation.draw,
    "floor": floor.draw,
    "equal-bytes": equal_bytes.draw,
    "frontier": frontier.draw,
    "frontier-reduction": frontier_reduction.draw,
    "proxy-joint": proxy_joint.draw,
    "gradients": gradients.draw,
    "screening": screening.draw,
    "domains": domains.draw,
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def draw(name: str, study: Path, output: Path) -> pd.DataFrame:
    result = CliRunner().invoke(main, ["figure", name, *figure_arguments(name, study), "--output", str(output)])
    assert result.exit_code == 0, result.output
    return pd.read_csv(output.with_suffix(".csv"))


def draw_again(name: str, table: pd.DataFrame, output: Path) -> Figure:
    """Draw a figure from its CSV alone."""
    types = {"seed": "Int64"} if name == "adaptation" else {}
    figures = []

    def kept(given: pd.DataFrame) -> Figure:
        figures.append(DRAW[name](given))
        return figures[0]

    write_figure(output, table.astype(types), kept)
    return figures[0]


@contextmanager
def without(*pictures: str) -> Iterator[None]:
    """Figures are laid out and written without pictures of some kinds, each of which takes as long as the layout."""
    with pytest.MonkeyPatch.context() as patch:
        for picture in pictures:
            patch.setattr(f"kvstages.figures.style.{picture}", lambda figure: b"drawn")
        yield


@pytest.fixture(scope="module")
def drawn(study, tmp_path_factory):
    """Every figure drawn by its command, with few resampled blocks: the .svg and the numbers of its CSV."""
    folder = tmp_path_factory.mktemp("figures")
    with without("png"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstages.stats.bootstrap.RESAMPLES", 100)
        return {name: (folder / f"{name}.svg", draw(name, study, folder / f"{name}.svg")) for name in DRAW}


@pytest.fixture(scope="module")
def again(drawn, tmp_path_factory):
    """Every figure drawn once more, from its CSV: the .svg and the figure itself; neither is to be changed."""
    folder = tmp_path_factory.mktemp("again")
    paths = {name: folder / f"{name}.svg" for name in DRAW}
    with without("png"):
        return {name: (path, draw_again(name, drawn[name][1], path)) for name, path in paths.items()}


@pytest.mark.parametrize("name", DRAW)
def test_same_bytes_again_and_from_the_csv_alone(name, drawn, again):
    for suffix in (".svg", ".csv"):
        first, second = (figures[name][0].with_suffix(suffix) for figures in (drawn, again))
        assert first.read_bytes() == second.read_bytes(), suffix


def test_same_pixels_again_and_from_the_csv_alone(study, tmp_path):
    """Of one figure. Those of all of a study are compared where it is run twice (test_workflow.py)."""
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw_again("storage-kl", draw("storage-kl", study, first), second)
    assert first.with_suffix(".png").read_bytes() == second.with_suffix(".png").read_bytes()
    assert first.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", DRAW)
def test_no_date_and_no_version_inside(name, drawn):
    """Of pixels: test_workflow.py."""
    path, _ = drawn[name]
    svg = path.read_text()
    assert svg.startswith("<?xml")
    assert not re.search(r"<dc:date>|Matplotlib v", svg)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("small"), layers=2, heads=2, budgets=("0.01",))


# What other figures show, write_study makes up alike whatever the size: of a small study they would be the same again.
OF_HEADS_AND_POLICIES = [
    *("sensitivity", "floor", "gradients"),
    *("allocation", "greedy-path", "storage-kl", "kl-by-position", "kl-distribution"),
]


@pytest.mark.parametrize("name", OF_HEADS_AND_POLICIES)
def test_small_study_with_one_budget(name, small, tmp_path):
    """As a picture of one kind."""
    with without("png"):
        draw(name, small, tmp_path / f"{name}.svg")
    assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
    assert (tmp_path / f"{name}.png").read_bytes() == b"drawn"


def test_sensitivity_numbers(drawn):
    _, table = drawn["sensitivity"]
    for precision, grid in published_sensitivities(PUBLISHED).items():
        part = table[table["precision"] == precision].sort_values(["layer", "head"])
        assert part["mean_kl"].tolist() == [value for layer in grid for value in layer]


def test_cells_of_domains_hold_ratio_interval_and_kl_and_darken_with_the_ratio(drawn, again):
    (_, table), (_, figure) = drawn["domains"], again["domains"]
    first = figure.axes[0]
    assert first.get_title(loc="left") == "policies of 5bits" and len(table) == 32
    said = [text.get_text() for text in first.texts]
    assert said.count("1") == 4 and said.count("1.30") == said.count("1.10") == 4 and said.count("1.40") == 4
    assert said.count("[1.30, 1.30]") == 4
    assert [label.get_text() for label in first.get_xticklabels()][1] == "letters\nblocks of 256"
    shades = [sum(cell.get_facecolor()[0][:3]) for cell in first.collections]
    own = table[table["budget"] == "5bits"]["ratio"].to_numpy()
    assert (np.diff(np.array(shades)[np.argsort(own, kind="stable")]) < 1e-9).all()


def test_no_two_lines_of_generated_text_look_alike_where_policies_coincide_in_one_panel_alone():
    shares = {"bf16": (1, 1), "int8": (0.9, 0.9), "int4": (0, 0), "greedy-0.001": (0.9, 0.8), "greedy-0.01": (0.5, 0.4)}
    rows = [
        {"prefill": prefill, "policy": policy, "tokens": 1, "share": own, "share_low": own, "share_high": own}
        for policy, both in shares.items()
        for prefill, own in zip(("exact", "stepwise"), both, strict=True)
    ]
    with style():
        figure = generation.draw(pd.DataFrame(rows))
    for axes, count in zip(figure.axes, (4, 5), strict=True):
        looks = {(line.get_color(), str(line._unscaled_dash_pattern)) for line in axes.lines}
        assert len(axes.lines) == len(looks) == count


def test_sensitivity_marks_scores_below_their_floor(drawn, again):
    (_, table), (_, figure) = drawn["sensitivity"], again["sensitivity"]
    assert table["below_floor"].tolist() == (table["mean_kl"] < FLOOR).astype(int).tolist()
    corners = [len(axes.patches) for axes in figure.axes if axes.get_title(loc="left")]
    assert corners == [38, 11]
    assert figure.legends[0].texts[0].get_text().startswith("below its floor: 49 of 192 scores")


@pytest.mark.parametrize(("floor", "said"), [(0.0, "none of 8 scores lies below its floor"), (None, None)])
def test_sensitivity_without_scores_below_the_floor(floor, said, tmp_path):
    write_gappy(tmp_path / "s.csv", sensitivity_table(layers=2, heads=2, floor=floor))
    with style():
        figure = sensitivity.draw(sensitivity.numbers(tmp_path / "s.csv"))
    assert [legend.texts[0].get_text() for legend in figure.legends] == ([said] if said else [])
    assert not any(axes.patches for axes in figure.axes if axes.get_title(loc="left"))


def test_sensitivity_of_keys_and_values_apart_unless_both_are_known_together(tmp_path):
    table = sensitivity_table(layers=2, heads=2, parts=("k", "v"), precisions=("int8", "int4", "int3", "int2"))
    write_gappy(tmp_path / "s.csv", table)
    with style():
        figure = sensitivity.draw(sensitivity.numbers(tmp_path / "s.csv"))
    titles = [title.split(" (")[0] for axes in figure.axes if (title := axes.get_title(loc="left"))]
    assert titles == [f"INT{bits}, {side}" for bits in (8, 4, 3, 2) for side in ("keys", "values")]
    write_gappy(tmp_path / "all.csv", sensitivity_table(layers=2, heads=2, parts=("kv", "k", "v")))
    assert set(sensitivity.numbers(tmp_path / "all.csv")["part"]) == {"kv"}


def test_sensitivity_of_whole_layers(tmp_path):
    write_gappy(tmp_path / "s.csv", sensitivity_table(heads=1, parts=("layer",)))
    table = sensitivity.numbers(tmp_path / "s.csv")
    with style():
        figure = sensitivity.draw(table)
    assert "one layer quantized" in figure.get_suptitle() and len(table) == 24
    maps = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert [axes.get_xlabel() for axes in maps] == ["all heads"] * 2 and not any(len(a.get_xticks()) for a in maps)
    both = sensitivity_table(parts=("kv",)), sensitivity_table(heads=1, parts=("layer",))
    write_gappy(tmp_path / "both.csv", pd.concat(both))
    assert set(sensitivity.numbers(tmp_path / "both.csv")["part"]) == {"kv"}


def test_allocation_draws_coinciding_policies_once(drawn, again):
    (_, table), (_, figure) = drawn["allocation"], again["allocation"]
    own = table[table["policy"] == "greedy-0.01"]
    for side in ("keys", "values"):
        assert own[side].value_counts().to_dict() == {"int4": 70, "int8": 19, "bf16": 7}
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    titles = [title.replace("\xa0", " ") for title in titles]
    assert titles == ["greedy 0.01\n7 BF16, 19 INT8, 70 INT4", "greedy 0.05, 0.1, 0.25, 0.5\n96 INT4"]


def test_allocation_shows_keys_and_values_where_they_differ(tmp_path):
    path = split_policy_file(tmp_path / "policy.json")
    table = allocation.numbers([path])
    assert table[["layer", "head", "keys", "values"]].to_numpy().tolist() == [
        [0, 0, "bf16", "bf16"], [0, 1, "int8", "int3"], [1, 0, "int4", "int2"], [1, 1, "int2", "int2"]
    ]  # fmt: skip
    with style():
        axes = allocation.draw(table).axes[0]
    words = [(text.get_text(), *text.get_position()) for text in axes.texts]
    assert words == [
        ("16", 0.5, 0.5), ("8", 1.25, 0.5), ("3", 1.75, 0.5), ("4", 0.25, 1.5), ("2", 0.75, 1.5), ("2", 1.5, 1.5)
    ]  # fmt: skip
    counts = ["keys: 1 BF16, 1 INT8, 1 INT4, 1 INT2", "values: 1 BF16, 1 INT3, 2 INT2"]
    assert axes.get_title(loc="left").replace("\xa0", " ").split("\n") == ["exact 9000B", *counts]


def test_greedy_path_starts_dense_and_ends_at_the_published_proxy(drawn):
    _, table = drawn["greedy-path"]
    path = table[table["policy"] == "greedy-0.01"]
    assert path.iloc[0][["step", "proxy", "total_bytes"]].tolist() == [0, 0.0, 1572864]
    assert path.iloc[-1]["step"] == 159
    assert path.iloc[-1]["proxy"] == pytest.approx(0.009985672175389482, rel=1e-12)
    assert path.iloc[-1]["total_bytes"] == 579840


def test_greedy_path_with_a_budget_in_bytes_ends_at_its_line(study, tmp_path):
    place = tmp_path / "greedy-580000B"
    place.mkdir()
    record = json.loads((study / "policies/greedy-0.01/policy.json").read_text())
    record |= {"policy": place.name, "budget": 580_000, "budget_in": "bytes"}
    (place / "policy.json").write_text(json.dumps(record))
    (place / "steps.csv").write_text((study / "policies/greedy-0.01/steps.csv").read_text())
    table = greedy_path.numbers([place / "policy.json", study / "policies/greedy-0.01/policy.json"])
    with style():
        figure = greedy_path.draw(table)
    (axes, *_) = figure.axes
    upright = [line for line in axes.lines if np.array_equal(line.get_xdata(), [580_000 / 1024] * 2)]
    assert len(upright) == 1
    # Both have the same path, so one line and one label do.
    assert "end of greedy 580000B, 0.01" in {text.get_text() for text in axes.texts}
    assert "budget 0.01" in {text.get_text().strip() for text in axes.texts}


def test_storage_numbers(drawn):
    _, table = drawn["storage-kl"]
    published = published_validation(PUBLISHED)
    assert table["policy"].tolist()[:4] == ["bf16", "int8", "int4", "greedy-0.01"]
    assert dict(zip(table["policy"], table["mean_kl"], strict=True)) == {
        policy: metrics["mean_kl"] for policy, metrics in published.items()
    }


def test_position_numbers(study, drawn):
    positions = pd.read_csv(study / "policies/int8/positions.csv")
    _, by_position = drawn["kl-by-position"]
    own = by_position[by_position["policy"] == "int8"]
    at_nine = positions.loc[positions["position"] == 9, "kl"]
    assert own.loc[own["position"] == 9, "mean_kl"].item() == pytest.approx(at_nine.mean(), rel=1e-12)
    assert own.loc[own["position"] == 0, "mean_kl"].item() == 0.0
    _, distribution = drawn["kl-distribution"]
    for row in distribution[distribution["policy"] == "int8"].itertuples():
        assert row.share == pytest.approx(np.mean(positions["kl"] >= row.kl)) if row.kl > 0 else row.share > 0.98


def test_adaptation_numbers(study, drawn):
    _, table = drawn["adaptation"]
    own = table[(table["arm"] == "published") & (table["against"] == "published-control") & (table["measure"] == "kl")]
    together, seeds = own[own["seed"].isna()], own[own["seed"].notna()]
    assert seeds["seed"].tolist() == [1337, 2026, 9001] and len(together) == 1
    assert together["effect"].item() == pytest.approx(seeds["effect"].mean())
    assert together["low"].item() < together["effect"].item() < together["high"].item()
    _, curves = drawn["adaptation-curves"]
    curve = pd.read_csv(study / "adaptation/published-control/seed-1337/curve.csv")
    own = curves[(curves["arm"] == "published-control") & (curves["seed"] == 1337)]
    assert own["kl"].tolist() == curve["kl"].tolist()


def test_floor_numbers(tmp_path):
    table = sensitivity_table(layers=2, heads=3, parts=("kv", "k"), precisions=("int8", "int2"))
    write_gappy(tmp_path / "s.csv", table)
    write_gappy(tmp_path / "none.csv", sensitivity_table("measured-bfloat16", 2, 3, floor=None))
    drawn = floor.numbers([tmp_path / "s.csv", tmp_path / "none.csv"])
    assert drawn[["source", "part", "level"]].drop_duplicates().to_numpy().tolist() == [
        *(["measured-float32", p, level] for p in ("kv", "k") for level in ("int8", "int2", "floor", "bf16-step")),
        *(["measured-bfloat16", "kv", level] for level in ("int8", "int4")),
    ]  # fmt: skip
    own = table[(table["part"] == "k") & (table["layer"] == 1) & (table["precision"] == "int2")]["mean_kl"]
    row = drawn[(drawn["part"] == "k") & (drawn["layer"] == 1) & (drawn["level"] == "int2")].iloc[0]
    assert row[["median_kl", "lowest_kl", "highest_kl", "heads"]].tolist() == [own.median(), own.min(), own.max(), 3]


def test_floor_draws_a_panel_for_each_source_and_part_on_one_scale(tmp_path):
    write_gappy(tmp_path / "s.csv", sensitivity_table(layers=3, heads=2, parts=("k", "v"), floor=1e-13))
    write_gappy(tmp_path / "t.csv", sensitivity_table("measured-bfloat16", 3, 2, ("k", "v"), floor=1e-5))
    with style():
        figure = floor.draw(floor.numbers([tmp_path / "s.csv", tmp_path / "t.csv"]))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [f"measured-{dtype}, {side}" for side in ("keys", "values") for dtype in ("float32", "bfloat16")]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"INT8", "INT4", "floor: neighbouring values", "one BF16 step"}
    # Below what other figures round off to 0, and still drawn where it is.
    assert 1e-14 < min(lines["floor: neighbouring values"].get_ydata()) < 1e-12


def test_equal_bytes_numbers(study, drawn):
    _, table = drawn["equal-bytes"]
    assert table[["budget", "compute_dtype"]].drop_duplicates().to_numpy().tolist() == [
        [budget, dtype] for budget in (0.01, 0.04) for dtype in ("float32", "bfloat16")
    ]
    own = table[(table["budget"] == 0.01) & (table["compute_dtype"] == "float32")]
    named, random = own[own["recipe"] != "random"], own[own["recipe"] == "random"]
    recipes = named[named["recipe"] != "uniform"]
    assert recipes["recipe"].tolist() == ["exact-split-low", "exact", "greedy", "published", "by-depth"]
    assert recipes["policy"].tolist() == recipes["recipe"].tolist()
    # Of the uniform policies the largest that takes no more bytes, among the recipes by its KL.
    assert named["mean_kl"].is_monotonic_increasing
    assert named[named["recipe"] == "uniform"]["policy"].tolist() == ["int4"]
    assert table[table["compute_dtype"] == "bfloat16"]["recipe"].ne("random").all()
    assert random["policy"].nunique() == 12 and random["mean_kl"].is_monotonic_increasing
    rows = pd.read_csv(study / "comparison/0.01/joint.csv")
    for row in own.itertuples():
        assert row.mean_kl == pytest.approx(rows[rows["policy"] == row.policy]["mean_kl"].mean())


def test_equal_bytes_fills_the_marks_that_differ_from_the_published_recipe(tmp_path):
    base = np.array([1.0, 2.0, 4.0])
    policies = [
        policy_rows("published", base),
        policy_rows("less", base / 2),
        policy_rows("same", base * [1.4, 1, 0.8]),
    ]
    path = write_set(tmp_path / "0.5", policies)
    with style():
        (axes,) = equal_bytes.draw(equal_bytes.numbers([path])).axes
    marks = {line.get_ydata()[0]: line for line in axes.lines if line.get_marker() in ("o", "s")}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["less", "same", "published"]
    assert [marks[place].get_markerfacecolor() for place in range(3)] == ["#1b1b1b", "white", "#1b1b1b"]
    assert [marks[place].get_marker() for place in range(3)] == ["o", "o", "s"]
    assert [text.get_text() for text in axes.texts] == ["−50 %", "−6 %"]
    assert axes.get_title(loc="left") == "budget 0.5: 195 KiB, FP32"


@pytest.mark.parametrize("name", DRAW)
def test_legends_fit_the_figure(name, drawn, again):
    _, table = drawn[name]
    column = {"equal-bytes": "budget", "proxy-joint": "sensitivity", "floor": "source"}.get(name)
    with style():
        figures = [again[name][1]]
        if column is not None:  # a single panel makes the narrowest figure that such a table has
            figures.append(DRAW[name](table[table[column] == table[column].iloc[0]]))
            figures[-1].draw_without_rendering()
        for figure in figures:
            for legend in figure.legends:
                box = legend.get_window_extent()
                assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_a_legend_takes_as_many_columns_as_fit():
    with style():
        figure = Figure(figsize=(4.8, 2), layout="constrained")
        axes = figure.subplots()
        for index in range(6):
            axes.plot([0, 1], [index, index], label=f"an arm with a long name {index}")
        legend_below(figure, *axes.get_legend_handles_labels())
        figure.draw_without_rendering()
        (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == [f"an arm with a long name {index}" for index in range(6)]
    assert legend.get_window_extent().x0 >= 0 and legend.get_window_extent().x1 <= figure.bbox.x1
    assert len({round(text.get_window_extent().x0) for text in legend.texts}) == 2  # columns


def test_equal_bytes_draws_every_random_policy(drawn, again):
    (_, table), (_, figure) = drawn["equal-bytes"], again["equal-bytes"]
    axes = figure.axes[0]
    dots = max(axes.lines, key=lambda line: len(line.get_xdata()))
    random = table[(table["recipe"] == "random") & (table["budget"] == 0.01)]
    assert len(random) == 12
    assert dots.get_xdata().tolist() == random["mean_kl"].tolist()
    assert axes.get_yticklabels()[-1].get_text() == "random (12)"


def test_frontier_draws_families_as_lines_and_uniform_policies_by_name(drawn, again):
    (_, table), (_, figure) = drawn["frontier"], again["frontier"]
    assert table["panel"].drop_duplicates().tolist() == ["KL, FP32", "KL, BF16", "excess KL, BF16"]
    for _, own in table.groupby("panel"):
        assert own["recipe"].drop_duplicates().tolist() == ["uniform", "published", "exact", "exact-split-low"]
    for _, own in table.groupby(["panel", "recipe"]):
        assert own["total_bytes"].is_monotonic_decreasing
    axes = figure.axes[0]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["KL, FP32", "KL, BF16", "excess KL, BF16"]
    lines = {line.get_label(): line for line in axes.lines}
    exact = table[(table["recipe"] == "exact") & (table["panel"] == "KL, FP32")]
    assert lines["exact"].get_xdata().tolist() == (exact["total_bytes"] / 1024).tolist()
    assert lines["exact"].get_ydata()[1:].tolist() == exact["kl"][1:].tolist()
    assert lines["uniform"].get_linestyle() == "None" and len(lines["uniform"].get_xdata()) == 4
    assert {text.get_text() for text in axes.texts} == {"BF16", "INT8", "INT4", "INT2"}


def test_less_kl_along_the_frontier_shows_what_the_arithmetic_hides(drawn, again):
    """In made-up BF16 arithmetic every policy has the same floor: it hides the differences, the excess shows them."""
    (_, table), (_, figure) = drawn["frontier-reduction"], again["frontier-reduction"]
    panels = ["KL, FP32", "KL, BF16", "excess KL, FP32", "excess KL, BF16"]
    assert table["panel"].drop_duplicates().tolist() == panels and set(table["over"]) == {"documents"}
    exact = table[table["recipe"] == "exact"].pivot(index="limit", columns="panel", values="reduction")
    largest = exact.index.max()
    assert exact.loc[largest, "KL, FP32"] > 0.2 > 0.01 > exact.loc[largest, "KL, BF16"]
    assert exact["excess KL, BF16"].tolist() == pytest.approx(exact["KL, FP32"].tolist(), rel=1e-3)
    assert [axes.get_title(loc="left") for axes in figure.axes] == panels
    line = next(line for line in figure.axes[0].lines if line.get_label() == "exact")
    assert sorted(line.get_ydata().tolist()) == sorted(exact["KL, FP32"].tolist())
    # The published recipe is the line at 0, and has none of its own.
    assert "published" not in {line.get_label() for axes in figure.axes for line in axes.lines}


def test_proxy_joint_numbers(drawn, again):
    (_, table), (_, figure) = drawn["proxy-joint"], again["proxy-joint"]
    assert table["sensitivity"].drop_duplicates().tolist() == ["measured-float32", "measured-bfloat16"]
    assert (table["ratio"] == table["mean_kl"] / table["proxy"]).all()
    assert set(table["set"]) == {"0.01", "0.04", "frontier"}
    axes = figure.axes
    exact = next(line for line in axes[0].lines if line.get_label() == "exact")
    own = table[(table["allocator"] == "exact") & (table["sensitivity"] == "measured-float32")]
    assert exact.get_xdata().tolist() == own["proxy"].tolist() and exact.get_ydata().tolist() == own["mean_kl"].tolist()
    below = next(line for line in axes[2].lines if line.get_label() == "exact")
    assert below.get_ydata().tolist() == own["ratio"].tolist()
    # Random policies are many: dots under the marks of all other allocators.
    named = {line.get_label(): line for line in axes[0].lines if not line.get_label().startswith("_")}
    random = named.pop("at-random")
    assert random.get_markersize() < min(line.get_markersize() for line in named.values())
    assert random.get_zorder() < min(line.get_zorder() for line in named.values())


def test_every_arm_has_a_mark_at_its_tick(again):
    _, figure = again["adaptation"]
    axes = figure.axes[0]
    ticks = dict(zip([label.get_text() for label in axes.get_yticklabels()], axes.get_yticks(), strict=True))
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    assert sorted(line.get_ydata()[0] for line in marks) == sorted(ticks.values())
    # An open mark is against the original model: the control has none of its own.
    faces = {line.get_ydata()[0]: line.get_markerfacecolor() for line in marks}
    assert faces[ticks["published-control"]] == "white" and faces[ticks["published"]] != "white"


def test_label_of_coinciding_policies():
    assert policies_label(["greedy-0.1", "int4", "greedy-0.05"]) == "INT4 = greedy 0.05, 0.1"


def failure(*words: object) -> str:
    result = CliRunner().invoke(main, ["figure", *map(str, words)])
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_missing_column(study, tmp_path):
    table = pd.read_csv(study / SENSITIVITY).drop(columns="mean_kl")
    table.to_csv(tmp_path / "broken.csv", index=False)
    said = failure("sensitivity", tmp_path / "broken.csv", "--output", tmp_path / "s.svg")
    assert "broken.csv: column 'mean_kl' is missing; found layer, head, part, precision" in said
    assert not (tmp_path / "s.svg").exists()


def test_hole_in_the_grid(study, tmp_path):
    pd.read_csv(study / SENSITIVITY).iloc[1:].to_csv(tmp_path / "holes.csv", index=False)
    said = failure("sensitivity", tmp_path / "holes.csv", "--output", tmp_path / "s.svg")
    assert "holes.csv: int8, part kv, has 95 rows for 95 heads, expected one for each of 12 x 8" in said


def test_text_instead_of_a_number(tmp_path):
    place = tmp_path / "noise" / "seed-1"
    place.mkdir(parents=True)
    (place / "curve.csv").write_text("step,cross_entropy,kl\n0,2.5,many\n")
    said = failure("adaptation-curves", place / "curve.csv", "--output", tmp_path / "c.svg")
    assert "curve.csv: column 'kl' holds 'many', expected a number" in said


def test_missing_files(study, tmp_path):
    assert "'nowhere.csv' does not exist" in failure("sensitivity", "nowhere.csv", "--output", tmp_path / "s.svg")
    lonely = tmp_path / "evaluation.json"
    lonely.write_text((study / "policies/int8/evaluation.json").read_text())
    assert f"{tmp_path}/positions.csv" in failure("kl-by-position", lonely, "--output", tmp_path / "p.svg")


def test_wrong_records(study, tmp_path):
    broken = tmp_path / "evaluation.json"
    broken.write_text("{}")
    assert "evaluation.json: key 'policy' is missing" in failure("storage-kl", broken, "--output", tmp_path / "s.svg")
    said = failure("greedy-path", study / "policies/int8/policy.json", "--output", tmp_path / "g.svg")
    assert "policy int8 is uniform, expected a greedy policy" in said
    said = failure("adaptation-curves", study / SENSITIVITY, "--output", tmp_path / "c.svg")
    assert "measured-bfloat16.csv: expected a file in a folder ARM/seed-SEED" in said


def test_output_has_to_be_svg(study, tmp_path):
    said = failure("sensitivity", *figure_arguments("sensitivity", study), "--output", tmp_path / "s.pdf")
    assert "s.pdf: a figure's output ends in .svg" in said


def test_empty_table(tmp_path):
    (tmp_path / "sensitivity.csv").write_text(",".join(SENSITIVITY_COLUMNS) + "\n")
    words = ["figure", "sensitivity", str(tmp_path / "sensitivity.csv"), "--output", str(tmp_path / "s.svg")]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert pd.read_csv(tmp_path / "s.csv").empty and (tmp_path / "s.png").exists()
    assert (
        "<!-- There is nothing to draw: no unit or policy has the values that it shows. -->"
        in (tmp_path / "s.svg").read_text()
    )


def test_a_precision_without_a_shade_of_its_own_lies_between_its_neighbours():
    assert [shades.between(BITS[name]) for name in shades.EVEN] == list(shades.EVEN.values())
    light = [sum(int(shades.between(bits)[place : place + 2], 16) for place in (1, 3, 5)) for bits in (16, 12, 8, 6, 4)]
    assert light == sorted(set(light))


def test_precisions_of_any_scheme_have_the_shade_of_their_bits_and_stand_in_order(tmp_path):
    grid = PrecisionGrid([["int8", "centred4"]], [["rotated6", "int4"]])
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"policy": "greedy-0.1", "precisions": grid.as_record()}))
    table = allocation.numbers([path])
    texts = {text.get_text() for text in allocation.draw(table).axes[0].texts}
    assert texts == {"8", "6", "4"} and shades.shade("centred4") == shades.EVEN["int4"]
    path.write_text(path.read_text().replace("centred4", "centred9"))
    with pytest.raises(ValueError, match=r"policy.json: layer 0, head 1: precision 'centred9'"):
        allocation.numbers([path])
    assert floor.in_order(["bf16-step", "centred4", "floor", "int8"]) == ["int8", "centred4", "floor", "bf16-step"]
