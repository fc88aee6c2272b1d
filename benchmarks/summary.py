"""Ratios of a benchmark run, as Markdown and as a figure: ``python -m benchmarks.summary [FOLDER]``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from kvstages.files.atomic import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Runs of the model over 64-token blocks in the published configuration, beside the sweep's: eight policies and their
# reference on 2,048 tokens, and two policies for each of three adapted models.
EVALUATED_TOKENS = (8 + 1 + 6) * 2048
ADAPTATION_STEPS = 150
# What each row says of where it was measured.
PLACE = ("processor", "instructions")


def speed_ups(folder: Path) -> pd.DataFrame:
    """One row for each instruction set, shape and dtype: naive time over ours for both executions, and shares."""
    table = pd.read_csv(folder / "sweep.csv")
    keys = ["instructions", "shape", "dtype"]
    naive = table[table["case"] == "naive"].groupby(keys)["seconds"].median()
    rows = []
    for execution in ("one-pass", "token-by-token"):
        ours = table[table["execution"] == execution].set_index(keys)
        rows.append(
            pd.DataFrame(
                {
                    "execution": execution,
                    "product": ours["product"],
                    "speed-up": naive / ours["seconds"],
                    "tokens a second": ours["tokens_per_second"],
                    "share of matmul": ours["share_of_matmul"],
                    "peak memory MB": ours["peak_memory_mb"],
                }
            ).reset_index()
        )
    return pd.concat(rows, ignore_index=True).sort_values([*keys, "execution"])


def study_ratios(folder: Path) -> pd.DataFrame:
    """The whole published configuration: estimated naive time over ours, and where ours goes."""
    sweep, study = pd.read_csv(folder / "sweep.csv"), pd.read_csv(folder / "study.csv")
    rows = []
    for dtype in study["dtype"].unique():
        plain = sweep[
            (sweep["case"] == "naive")
            & (sweep["shape"] == "full")
            & (sweep["dtype"] == dtype)
            & (sweep["instructions"] == study["instructions"].iloc[0])
        ]
        chosen = study[study["dtype"] == dtype]
        step = chosen[chosen["case"] == "naive-adaptation"]["seconds_a_step"].item()
        ours = chosen[chosen["case"] == "study"].iloc[0]
        evaluated = EVALUATED_TOKENS / plain["tokens_per_second"].median()
        naive = plain["seconds"].median() + evaluated + ADAPTATION_STEPS * step
        parts = {
            part: ours[f"seconds_{part}"] / ours["seconds"] for part in ("sweep", "evaluation", "adaptation", "adapted")
        }
        rows.append(
            {
                "dtype": dtype,
                "speed-up": naive / ours["seconds"],
                **{f"share {part}": share for part, share in parts.items()},
                "peak memory MB": ours["peak_memory_mb"],
            }
        )
    return pd.DataFrame(rows)


def before_and_after(folder: Path) -> pd.DataFrame:
    """Processor time of the default study by code and what the study has in it, and that over the first row's."""
    table = pd.read_csv(folder / "default-study.csv")
    table["over the first"] = table["processor_seconds"] / table["processor_seconds"].iloc[0]
    return table.drop(columns=["processor_seconds", *PLACE], errors="ignore")


def goals(folder: Path) -> pd.DataFrame:
    """What was asked for beforehand, beside what the tables that are there say."""
    tables = {path.stem: pd.read_csv(path) for path in sorted(folder.glob("*.csv"))}
    rows = []

    def add(what: str, of: str, goal: float, found: float, most: bool = False) -> None:
        met = found <= goal if most else found >= goal
        limit = f"at {'most' if most else 'least'} {goal:,.4g}"
        rows.append({"what": what, "of": of, "goal": limit, "found": float(found), "met": "yes" if met else "no"})

    if "sweep" in tables:
        for _, row in speed_ups(folder).query("shape == 'full'").iterrows():
            of, one_pass = f"{row['dtype']}, {row['instructions']}", row["execution"] == "one-pass"
            for goal in (30, 45) if one_pass else (15,):
                add(f"sweep, {row['execution']}: naive time over ours", of, goal, row["speed-up"])
            if one_pass:
                add("sweep: share of matmul", of, 0.7, row["share of matmul"])
            add(f"sweep, {row['execution']}: peak memory, MB", of, 4096, row["peak memory MB"], most=True)
    if "workflow" in tables:
        shares = tables["workflow"].set_index("part")["share"]
        add("default study: share of starting processes", "processor time", 0.1, shares["stages, starting"], most=True)
    if "adaptation" in tables:
        for _, row in tables["adaptation"].query("shape == 'full'").iterrows():
            add("step of adaptation: published time over ours", row["dtype"], 1.5, row["ratio"])
    if "gradients" in tables:
        for _, row in tables["gradients"].query("against == 'shape'").iterrows():
            add(
                "scores from gradients: forward passes",
                f"{row['shape']} shape",
                100,
                row["gradients_passes"],
                most=True,
            )
    if "schemes" in tables:
        for _, row in tables["schemes"].query("precision != 'int4'").iterrows():
            goal = 1.15 if row["task"] == "decode" else 1.1
            add(
                f"schemes, {row['task']}: time over uniform INT4's",
                row["precision"],
                goal,
                row["over_published"],
                most=True,
            )
    if "generation" in tables:
        for _, row in tables["generation"].iterrows():
            size = f"batch {row['batch']:.0f}, {row['context']:,.0f} tokens"
            if row["batch"] == 1:
                for cache in ("int4", "mixed"):
                    add("generation: speed over DynamicCache's", f"{cache}, {size}", 0.8, row[f"speed_{cache}"])
            for other in ("quanto", "hqq"):
                add(f"generation: INT4's speed over {other}'s", size, 1, row["speed_int4"] / row[f"speed_{other}"])
        last = tables["generation"].query("batch == 1").iloc[-1]
        for cache in ("int4", "mixed"):
            of = f"{cache}, {last['context']:,.0f} tokens"
            add(
                "generation: resident bytes over stored",
                of,
                1.05,
                last[f"resident_{cache}"] / last[f"stored_{cache}"],
                most=True,
            )
    if "generation-memory" in tables:
        dense, ours = (tables["generation-memory"].set_index("cache").loc[name] for name in ("dynamic", "int4"))
        saved, held = ((dense[name] - ours[name]) / 1e6 for name in ("peak_bytes", "resident_bytes"))
        add("generation: peak of the process below DynamicCache's, MB", "int4, what its tensors save", held, saved)
    return pd.DataFrame(rows)


def decode_ratios(folder: Path) -> pd.DataFrame:
    """Speed of the mixed policy over that of BF16 heads, bytes over bytes, and shares of the memory bandwidth."""
    table = pd.read_csv(folder / "decode.csv")
    return table[["context", "batch", *(name for name in table.columns if "over" in name or "share" in name)]]


def scaling_ratios(folder: Path) -> pd.DataFrame:
    """Seconds against heads, layers, tokens and block length, over those of the first row of each."""
    table = pd.read_csv(folder / "scaling.csv")
    value = {
        "heads": table["heads"],
        "layers": table["depth"],
        "tokens": table["blocks"] * 64,
        "block length": table["length"],
    }
    table["value"] = [value[against][index] for index, against in table["against"].items()]
    first = table.groupby("against")["seconds"].transform("first")
    return pd.DataFrame(
        {
            "against": table["against"],
            "value": table["value"].astype(int),
            "time over the first": table["seconds"] / first,
            "share of matmul": table["share_of_matmul"],
            "peak memory MB": table["peak_memory_mb"],
        }
    )


def gradients_ratios(folder: Path) -> pd.DataFrame:
    """All scores from gradients and from the sweep, in forward passes over the calibration window."""
    table = pd.read_csv(folder / "gradients.csv")
    value = table["shape"].astype(object)
    for key in ("heads", "depth", "precisions"):
        value = value.where(table["against"] != key, table[key])
    return pd.DataFrame(
        {
            "against": table["against"].replace("depth", "layers"),
            "value": [cell if isinstance(cell, str) else str(int(cell)) for cell in value],
            "scores": table["scores"].astype(int),
            "passes, gradients": table["gradients_passes"],
            "passes, sweep": table["sweep_passes"],
            "sweep over gradients": table["sweep_over_gradients"],
            "peak memory MB": table["peak_memory_mb"],
        }
    )


def draw_gradients(folder: Path) -> None:
    """Passes of gradients and sweep at both shapes, and how they grow with heads, layers and precisions.

    A figure's numbers lie beside it as CSV, so its name is none of a table's.
    """
    from kvstages.figures.style import write_figure

    write_figure(folder / "gradients-passes.svg", gradients_ratios(folder), gradients_panels)


def gradients_panels(table: pd.DataFrame) -> Figure:
    """A panel for the two shapes, and one for each thing that grows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    for axes, (against, rows) in zip(panels, table.groupby("against", sort=False), strict=True):
        places = range(len(rows))
        looks = (("gradients", "o", "-", "black"), ("sweep", "s", ":", "0.45"))
        for name, marker, line, colour in looks:
            joined = "" if against == "shape" else line
            axes.plot(places, rows[f"passes, {name}"], marker=marker, linestyle=joined, color=colour, label=name)
        axes.axhline(100, color="0.75", linewidth=0.8, zorder=0)
        axes.set_xticks(list(places), rows["value"])
        axes.margins(x=0.25)
        axes.set(yscale="log", xlabel=against, ylim=(10, None))
    panels[0].set_ylabel("forward passes over the window")
    panels[0].legend(frameon=False)
    figure.suptitle("Cost of all scores: keys, values and both, every precision (line: 100 passes)", x=0.01, ha="left")
    return figure


def markdown(table: pd.DataFrame) -> str:
    """A table of few digits."""
    rows = [list(table.columns), ["---"] * len(table.columns)]
    rows += [list(map(written, row)) for row in table.to_numpy()]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def written(cell: object) -> str:
    """A number in three digits, or as a whole one where it has more before the point; nothing for one that is not."""
    if not isinstance(cell, float):
        return str(cell)
    if math.isnan(cell):
        return ""
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"


def draw(folder: Path) -> None:
    """Speed-up of the sweep, decoding speed of the mixed policy, and growth of the cost, side by side."""
    from kvstages.figures.style import write_figure

    write_figure(folder / "benchmarks.svg", speed_ups(folder), lambda table: panels(folder, table))


def panels(folder: Path, table: pd.DataFrame) -> Figure:
    """The three panels; ``table`` is that of the speed-ups."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    shown = table[(table["shape"] == "full") & (table["instructions"] == max(table["instructions"], key=len))]
    labels = [f"{row['execution']}\n{row['dtype']}" for _, row in shown.iterrows()]
    bars = left.bar(labels, shown["speed-up"], color="0.6", edgecolor="black", width=0.6)
    left.bar_label(bars, fmt="%.0f×", padding=2)
    left.set(title="Sweep, full shape, one thread", ylabel="naive time over ours")
    left.margins(y=0.15)
    ratios = decode_ratios(folder)
    for marker, (batch, rows) in zip("os^", ratios.groupby("batch"), strict=False):
        middle.plot(rows["context"], rows["mixed_over_bf16"], marker=marker, color="black", label=f"batch {batch}")
        plain = rows.dropna(subset="unpacking_over_bf16")
        middle.plot(plain["context"], plain["unpacking_over_bf16"], marker=marker, color="0.5", linestyle=":")
    middle.set(xscale="log", ylim=(0, 1.15), xlabel="context (tokens)", ylabel="tokens a second, mixed over BF16")
    middle.set_title("Decoding (dotted: no working copy)")
    middle.set_xticks([64, 256, 1024], ["64", "256", "1,024"])
    middle.minorticks_off()
    middle.legend(frameon=False)
    for marker, (against, rows) in zip("os^D", scaling_ratios(folder).groupby("against"), strict=False):
        grown = rows["value"] / rows["value"].iloc[0]
        right.plot(grown, rows["time over the first"], marker=marker, color="black", mfc="white", label=against)
    right.plot([1, 16], [1, 16], color="0.7", linewidth=0.8, zorder=0)
    right.set(xscale="log", yscale="log", xlabel="size over the smallest", ylabel="time over the smallest's")
    right.set_title("Growth of the sweep's cost")
    right.legend(frameon=False)
    return figure


def of_table(name: str, *left_out: str) -> Callable[[Path], pd.DataFrame]:
    """How a section shows a table as it is, without some of its columns."""
    return lambda folder: pd.read_csv(folder / f"{name}.csv").drop(columns=list(left_out), errors="ignore")


# Table to the title of its section, and what it shows.
SECTIONS = {
    "start-up": (
        "Start-up: the processor time of each stage on a decoder of next to nothing",
        of_table("start-up", *PLACE),
    ),
    "workflow": (
        "The default study as Snakemake makes it: where its processor time goes",
        of_table("workflow", "processor_seconds", *PLACE),
    ),
    "default-study": ("The default study before and after it was made faster", before_and_after),
    "sweep": ("The sweep: naive time over ours", speed_ups),
    "profile": (
        "Where the one-pass sweep's time goes, full shape",
        of_table("profile", "case", "peak_memory_mb", *PLACE),
    ),
    "study": ("The whole published configuration, full shape", study_ratios),
    "adaptation": (
        "A step of adaptation: time as published over ours, and over that of the student's own passes",
        of_table("adaptation", "case", "threads", "peak_memory_mb", *PLACE),
    ),
    "decode": ("Decoding: the mixed policy against BF16 heads, BF16 arithmetic", decode_ratios),
    "scaling": ("How the sweep of the lowest layer grows, FP32", scaling_ratios),
    "gradients": ("All scores from gradients (32 probes) and from the sweep, FP32", gradients_ratios),
}


def place(folder: Path, name: str) -> str:
    """What a table was measured on, as it says."""
    table = pd.read_csv(folder / f"{name}.csv")
    processors = ", ".join(dict.fromkeys(table["processor"]))
    sets = f" ({' and '.join(dict.fromkeys(table['instructions']))})" if "instructions" in table else ""
    return f"On {processors}{sets}."


def page(folder: Path) -> str:
    """The text of ratios.md, of the tables that are there."""
    there = {name: section for name, section in SECTIONS.items() if (folder / f"{name}.csv").exists()}
    parts = [f"# Ratios, one thread\n\nEach table is of one run.\n\n## Goals\n\n{markdown(goals(folder))}"]
    parts += [
        f"## {title}\n\n{place(folder, name)}\n\n{markdown(show(folder))}" for name, (title, show) in there.items()
    ]
    return "\n".join(parts)


def summarise(folder: Path) -> str:
    """Write ratios.md and the figures, of the tables that are there; the text of the former."""
    text = page(folder)
    write_text(folder / "ratios.md", text)
    if all((folder / f"{name}.csv").exists() for name in ("sweep", "decode", "scaling")):
        draw(folder)
    if (folder / "gradients.csv").exists():
        draw_gradients(folder)
    return text


if __name__ == "__main__":
    print(summarise(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")))
