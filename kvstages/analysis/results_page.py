"""docs/results.md and the README's findings, as text around the numbers of docs/findings.json (see ``findings``).

Every number comes from that record. Sentences that state an order say whichever order the numbers have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstages.analysis.adaptation_page import brief, finding
from kvstages.analysis.decoder_page import section
from kvstages.analysis.engines_page import engine_lines
from kvstages.analysis.findings import compared_recipes
from kvstages.analysis.joint_table import PUBLISHED, RANDOM, UNIFORM
from kvstages.analysis.number_text import nats

START, END = "<!-- findings -->", "<!-- /findings -->"
COMMAND = "kvstages findings results/demo"
# Column of a table: arithmetic, measure, header.
MEASURED = (
    ("float32", "kl_reduction", "KL, FP32"),
    ("bfloat16", "kl_reduction", "KL, BF16"),
    ("float32", "excess_reduction", "excess KL, FP32"),
    ("bfloat16", "excess_reduction", "excess KL, BF16"),
)
WHAT = {
    "greedy": "greedy on FP32 scores",
    "exact": "exact on FP32 scores",
    "exact-bf16": "exact on BF16 scores",
    "refined": "exact, scored again around the policy",
    "exact-split": "exact, keys and values apart",
    "exact-low": "exact, down to INT2",
    "exact-split-low": "exact, keys and values apart, down to INT2",
    "exact-gradients": "exact on scores from gradients",
    "exact-gradients-split-low": "exact on gradients, keys and values apart, down to INT2",
    "exact-layer": "exact, whole layers",
    "by-layer": "by layer (all heads of a layer alike)",
    "by-depth": "by depth (first layers higher)",
    "reconstruction": "by the error of keys and values",
    "published-int8": "published recipe with INT8 alone",
    "exact-int8": "exact on FP32 scores with INT8 alone",
}


def page(record: Mapping[str, Any]) -> str:
    """The page docs/results.md."""
    found = record["machines"][record["first"]]
    parts = [
        _introduction(record, found),
        _equal_bytes(found),
        _frontier(found),
        _scores(found),
        _proxy(found),
        _gradients(found),
        _adaptation(record),
        _policies(found),
        _engines(found),
        _machines(record),
        *(section(name, other) for name, other in sorted(record.get("decoders", {}).items())),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def readme_block(record: Mapping[str, Any]) -> str:
    """The findings of the README, with the marks around them."""
    found = record["machines"][record["first"]]
    windows = found["windows"]
    lines = [
        f"From `demo` on one machine ({record['first']}), {windows['blocks']} held-out blocks of "
        f"{windows['documents']} texts. *Less KL* is against the published recipe at the same bytes. "
        "[Results](docs/results.md) have intervals and other machines.",
        "",
    ]
    findings = [
        _finding_scores(found),
        _finding_equal_bytes(found),
        _finding_split(found),
        _finding_schemes(record),
        _finding_adaptation(record),
    ]
    lines += [f"{number}. {text}" for number, text in enumerate(filter(None, findings), start=1)]
    return "\n".join([START, *lines, END])


def _finding_scores(found: Mapping[str, Any]) -> str:
    own, bf16 = found["scores"]["measured-float32"], found["scores"]["measured-bfloat16"]
    return (
        "**Scores must rise above the arithmetic.** In FP32 the median INT4 score is "
        f"{own['int4']['median_ratio_to_int8']:.0f} times the INT8 one (theory: 329). In BF16 it is "
        f"{bf16['int4']['median_ratio_to_int8']:.1f} times, and {bf16['int8']['below_floor']} of "
        f"{bf16['int8']['heads']} "
        "INT8 scores are below the noise floor."
    )


def _finding_equal_bytes(found: Mapping[str, Any]) -> str:
    first, last = found["comparison"][0], found["comparison"][-1]
    exact, uniform = first["policies"]["exact"], _uniform_within(first)
    own, other, _, excess = (_less(exact[dtype][measure][0]) for dtype, measure, _ in MEASURED)
    small = ""
    if uniform:
        value = uniform[1]["float32"]["kl_reduction"][0]
        small = f" Uniform {uniform[0].upper()}, in fewer bytes, has {_less(value)}."
    value = last["policies"]["exact"]["float32"]["kl_reduction"][0]
    return (
        f"**FP32 scores.** At {first['bytes']:,} bytes they give {own} KL in FP32, {other} in BF16, and {excess} of "
        f"what quantization adds to the distance from the FP32 model.{small} At {last['bytes']:,} bytes: "
        f"{_less(value)}."
    )


def _finding_split(found: Mapping[str, Any]) -> str:
    entries = [each["policies"].get("exact-split") for each in found["comparison"]]
    if not all(entries):
        return ""
    own, other = (
        _and([_percent(entry[dtype]["kl_reduction"][0]) for entry in entries]) for dtype in ("float32", "bfloat16")
    )
    return f"**Keys and values apart** give {own} less KL in FP32, {other} in BF16."


def _finding_schemes(record: Mapping[str, Any]) -> str:
    """What the recommended scheme and allocation alone buy, at the largest budget that a decoder's study screened."""
    for name, found in sorted(record.get("decoders", {}).items()):
        rows = {row["recipe"]: row for row in reversed(found.get("schemes", [])) if row["budget"]}
        if {"recommended", "exact-published"} <= set(rows):
            best, alone = rows["recommended"], rows["exact-published"]
            return (
                f"**The quantizer counts more than its allocation.** `{name}` at {best['budget']}: "
                f"{best['times_less']:.1f} times less KL; allocation alone {alone['times_less']:.1f} "
                "([schemes](docs/schemes.md))."
            )
    return ""


def put_block(text: str, block: str, name: str) -> str:
    """A page with what stands between the marks replaced; ValueError names the page that has no marks."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"{name}: expected the marks {START} and {END}, once each")
    return text[: text.index(START)] + block + text[text.index(END) + len(END) :]


def _introduction(record: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    windows = found["windows"]
    return f"""
# Results

`{COMMAND}` writes this page and the findings of the README from the result files of the default study and from
`docs/findings.json`, which keeps the numbers by machine. No number here is typed. These were measured on
{record["first"]} (PyTorch {found["machine"]["torch"]}, {_and(found["machine"]["devices"])}); the last section has
those of other machines.

The held-out window is {windows["blocks"]} blocks drawn from {windows["documents"]} texts. Brackets hold 95 %
intervals over these texts: whole texts are drawn again, so an interval speaks of other texts of this kind. The
tables of the report also have intervals over blocks. Bytes are payload plus scales of one cache of 64 tokens. A
smaller cache is not a faster decoder.

Two measures are used, in FP32 and in BF16 arithmetic ([method](method.md#measuring)):

- *KL* is KL(policy || reference). The reference is the same arithmetic with an unquantized BF16 cache.
- *Excess KL* is KL(policy || FP32 model) less KL(reference || FP32 model), block by block, where the FP32 model
  stores its keys and values exactly. It is what quantization adds to the distance that the arithmetic and the BF16
  cache already have.

A KL in BF16 arithmetic counts every rounding that a change flips in later layers, though such a flip moves the model
no further from the FP32 model on average. So the two measures can order recipes differently, and every comparison
below gives both.
"""


def _equal_bytes(found: Mapping[str, Any]) -> str:
    text = [
        "## Recipes at equal bytes",
        "The published recipe is greedy on scores measured in BF16 (whole heads, INT8 and INT4). It sets the bytes, "
        "and every "
        "other recipe takes these or less, by less than one unit's move saves. Tables show how much less KL a recipe "
        "has than "
        "the published one, paired over the same blocks; a minus is more KL. A uniform policy takes its own bytes.",
    ]
    for each in found["comparison"]:
        text += [_comparison_table(each), _comparison_said(found, each)]
    return "\n\n".join(text)


def _comparison_table(each: Mapping[str, Any]) -> str:
    policies = each["policies"]
    base = policies[PUBLISHED]
    lines = [
        f"### {each['bytes']:,} bytes ({each['compression']:.2f} times fewer than BF16)",
        "",
        "| recipe | bytes | " + " | ".join(f"less {header}" for *_, header in MEASURED) + " |",
        "|---|---|---|---|---|---|",
        f"| published (values in nats) | {base['bytes']:,} | "
        + " | ".join(nats(base[dtype][_measure(name)][0]) for dtype, name, _ in MEASURED)
        + " |",
    ]
    names = [name for name in WHAT if name in policies]
    names += [name for name in policies if name not in WHAT and name not in (PUBLISHED, RANDOM, "bf16")]
    for name in [*names, RANDOM]:
        entry = policies.get(name)
        if entry is None:
            continue
        said = WHAT.get(name, f"uniform {name.upper()}" if entry["recipe"] == UNIFORM else "random, mean")
        cells = [_reduction(entry.get(dtype, {}).get(measure)) for dtype, measure, _ in MEASURED]
        lines.append(f"| {said} | {entry['bytes']:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _comparison_said(found: Mapping[str, Any], each: Mapping[str, Any]) -> str:
    policies = each["policies"]
    winners = {}
    for dtype, name, header in MEASURED:
        rank = "rank" if name == "kl_reduction" else "excess_rank"
        ranked = {policy: policies[policy].get(dtype, {}).get(rank) for policy in [*compared_recipes(each), PUBLISHED]}
        winners[header] = [policy for policy, place in ranked.items() if place == 1]
    orders = "; ".join(
        f"{header}: {_and([f'`{name}`' for name in names])}" for header, names in winners.items() if names
    )
    published = found["published"].get(each["budget"])
    said = [f"Least of each measure among the recipes: {orders}."]
    if published and published["int4_share"] is not None:
        said.append(
            f"The published recipe's policy has {published['int4_heads']} heads in INT4. By the FP32 scores they are "
            f"{_percent(published['int4_share'])} of its proxy."
        )
    uniform = _uniform_within(each)
    if uniform:
        name, entry = uniform
        fewer = _percent(1 - entry["bytes"] / each["bytes"])
        own, other = (_less(entry[dtype]["kl_reduction"][0]) for dtype in ("float32", "bfloat16"))
        said.append(
            f"Uniform {name.upper()} takes {fewer} fewer bytes than the published recipe and has {own} KL in FP32 and "
            f"{other} in BF16."
        )
    return " ".join(said)


def _frontier(found: Mapping[str, Any]) -> str:
    frontier = found["frontier"]
    families = ("exact", "exact-split", "exact-int8", "published-int8")
    by_key = {
        (dtype, row["recipe"], row["limit"]): row
        for dtype, rows in frontier.items()
        for row in rows
        if row["recipe"] in families
    }
    limits = sorted({limit for _, _, limit in by_key}, reverse=True)
    lines = [
        "## Along the frontier",
        "",
        "A budget in nats of BF16 scores ends at other bytes on another processor, so recipes are compared at byte "
        "totals "
        "that are the same everywhere. Again: less KL than the published recipe at the same bytes.",
    ]
    for dtype, measure, header in MEASURED:
        lines += ["", f"### {header}", "", "| bytes | " + " | ".join(WHAT[name] for name in families) + " |"]
        lines.append("|---" * (len(families) + 1) + "|")
        for limit in limits:
            cells = [_reduction(by_key.get((dtype, name, limit), {}).get(measure)) for name in families]
            if any(cell != "–" for cell in cells):
                lines.append(f"| {limit:,} | " + " | ".join(cells) + " |")
        told = {
            kind: [limit for limit in limits if _side(by_key.get((dtype, "exact", limit), {}).get(measure)) == kind]
            for kind in ("less", "more")
        }
        lines += [
            "",
            f"Exact on FP32 scores has less {header.split(',')[0]} than the published recipe at {len(told['less'])} "
            "totals, and "
            f"more at {len(told['more'])}{_at(told['more'])}; elsewhere the interval holds 0.",
        ]
    return "\n".join(lines)


def _scores(found: Mapping[str, Any]) -> str:
    own, bf16 = found["scores"]["measured-float32"], found["scores"]["measured-bfloat16"]
    return f"""
## Scores

In FP32, where all interventions of a sweep share the reference's roundings to BF16, the median INT4 score is
{own["int4"]["median_ratio_to_int8"]:.0f} times the INT8 one. Rounding theory says 329. The scores add up to
{own["int8"]["sum_over_joint"]:.2f} (INT8) and {own["int4"]["sum_over_joint"]:.2f} (INT4) times the joint KL of the
uniform policy, which was measured on other text and without shared roundings; {own["int8"]["below_floor"]} of
{own["int8"]["heads"]} INT8 scores lie below their floor.

In BF16 arithmetic the same ratio is {bf16["int4"]["median_ratio_to_int8"]:.1f}, the INT8 scores add up to
{bf16["int8"]["sum_over_joint"]:.0f} times the joint KL, and {bf16["int8"]["below_floor"]} of {bf16["int8"]["heads"]}
lie below the floor: they measure rounding, and they differ between processors. The published study has 1.9 and 31.

Moving one head's values by a single BF16 step does {own["int8"]["median_bf16_step"] / own["int8"]["median"]:.1f}
times what INT8 does (medians). Without shared roundings a joint run in FP32 flips such steps in later layers. That
adds most to the smallest scores, so the ratio falls well below theory.

Policies from FP32 scores may still differ by a head between machines: where two moves have nearly the same score,
the last digits decide.
"""


def _proxy(found: Mapping[str, Any]) -> str:
    lines = [
        "## Where the proxy holds",
        "",
        "The proxy is the sum of a policy's scores on the calibration window; the joint KL is measured on the "
        "held-out one. For "
        "policies of the FP32 scores, by the size of the proxy:",
        "",
        "| proxy (nats) | policies | rank correlation with joint KL | median joint KL / proxy |",
        "|---|---|---|---|",
    ]
    for row in found["proxy"]["decades"]:
        ends = ""
        if row["rank_correlation_low"] is not None:
            ends = f" [{row['rank_correlation_low']:.2f}, {row['rank_correlation_high']:.2f}]"
        value = "–" if row["rank_correlation"] is None else f"{row['rank_correlation']:.3f}{ends}"
        lines.append(f"| {row['proxies']} | {row['policies']} | {value} | {row['median_ratio']:.2f} |")
    for row in found["proxy"]["random_by_budget"]:
        budget = row["proxies"].removeprefix("random, ")
        lines.append(
            f"| random policies at {budget} | {row['policies']} | {row['rank_correlation']:.2f} "
            f"[{row['rank_correlation_low']:.2f}, {row['rank_correlation_high']:.2f}] | {row['median_ratio']:.2f} |"
        )
    random = found["proxy"]["random"].get("calibration")
    same = ""
    if random is not None:
        same = (
            f" On the calibration window itself it is {random['rank_correlation']:.2f} for the last of these, so the "
            "other text is not the only reason."
        )
    lines += [
        "",
        "The first row is of all policies. They differ by orders of magnitude, and nearly any sum of scores would "
        "order "
        "them. Random policies of equal bytes are the hard test: the last rows have their rank correlation, with "
        "intervals "
        f"over blocks.{same} Below about 1e-5 nats the joint KL is mostly the flips of BF16 roundings that any change "
        "makes, which no score counts; the excess KL does not have them.",
    ]
    return "\n".join(lines)


def _gradients(found: Mapping[str, Any]) -> str:
    rows = found["gradients"]
    by_precision = {
        precision: [row["rank_correlation"] for row in rows if row["precision"] == precision]
        for precision in dict.fromkeys(row["precision"] for row in rows)
    }
    said = "; ".join(f"{name.upper()}: {min(own):.3f} to {max(own):.3f}" for name, own in by_precision.items())
    return f"""
## Scores from gradients

{rows[0]["probes"]} backward passes score every head, its keys and its values at every precision. Rank correlation
with the measured scores, over heads, keys and values: {said}. At few bits the errors leave the second order.
"""


def _adaptation(record: Mapping[str, Any]) -> str:
    if "adaptation" not in record:
        return ""
    return f"""
## Adaptation

{finding(record["adaptation"])} [Adaptation](adaptation.md) has the numbers, what it costs, and fewer bits.
"""


def _finding_adaptation(record: Mapping[str, Any]) -> str:
    if "adaptation" not in record:
        return ""
    return f"**Adaptation.** {brief(record['adaptation'])} [More](docs/adaptation.md)"


def _policies(found: Mapping[str, Any]) -> str:
    lines = [
        "## The study's own policies",
        "",
        "| policy | proxy (nats) | mean KL in FP32 (nats), interval over blocks | agreement | bytes | compression |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["policies"]:
        ends = f" [{nats(row['mean_kl_low'])}, {nats(row['mean_kl_high'])}]" if row["mean_kl"] else ""
        lines.append(
            f"| {row['policy']} | {nats(row['proxy'])} | {nats(row['mean_kl'])}{ends} | "
            f"{100 * row['agreement']:.2f} % | "
            f"{row['total_bytes']:,} | {row['compression']:.2f} |"
        )
    return "\n".join(lines)


def _engines(found: Mapping[str, Any]) -> str:
    return "\n".join(["## Engines", "", *engine_lines(found["engines"])]) if found.get("engines") else ""


def _machines(record: Mapping[str, Any]) -> str:
    lines = [
        "## By machine",
        "",
        "The published recipe's policy follows BF16 scores, which are mostly rounding, so it differs between "
        "processors, and with it every figure that is relative to it.",
        *_agreement(record),
        "",
        "| machine | budget | less KL, FP32 | less KL, BF16 | less excess KL, BF16 | joint KL of exact, FP32 (nats) "
        "| median INT4 / INT8 "
        "score, FP32 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in record["machines"].items():
        for each in found["comparison"]:
            exact = each["policies"]["exact"]
            cells = [
                _percent(exact[dtype][measure][0]) for dtype, measure, _ in (MEASURED[0], MEASURED[1], MEASURED[3])
            ]
            ratio = found["scores"]["measured-float32"]["int4"]["median_ratio_to_int8"]
            lines.append(
                f"| {name} | {each['budget']} | {' | '.join(cells)} | {nats(exact['float32']['mean_kl'][0])} | "
                f"{ratio:.0f} |"
            )
    lines += ["", "Less KL: exact on FP32 scores against the published recipe at the same bytes."]
    return "\n".join(lines)


def _agreement(record: Mapping[str, Any]) -> list[str]:
    """How far what is computed in FP32 agrees between machines; nothing where no two compared at one budget."""
    comparisons = [
        {each["budget"]: each["policies"] for each in found["comparison"]} for found in record["machines"].values()
    ]
    budgets = set.intersection(*map(set, comparisons))
    if len(comparisons) < 2 or not budgets:
        return []

    def apart(policies: Sequence[str]) -> float:
        """The largest distance of two machines' joint KL, over the larger."""
        kls = [
            [each[budget][policy]["float32"]["mean_kl"][0] for each in comparisons]
            for budget in budgets
            for policy in policies
        ]
        return max(1 - min(each) / max(each) for each in kls)

    return [
        "Uniform policies are the same on every machine, and their joint KL in FP32 agrees to "
        f"{100 * apart(['int8', 'int4']):.1f} %. Policies from FP32 scores may differ by a head where two moves have "
        f"nearly the same score, so the joint KL of `exact` agrees to {100 * apart(['exact']):.1f} % only."
    ]


# How numbers are written.


def _measure(reduction: str) -> str:
    return "mean_kl" if reduction == "kl_reduction" else "excess_kl"


def _percent(value: float | None) -> str:
    if value is None:
        return "–"
    places = 0 if abs(value) >= 1 else 1
    return f"{100 * value:,.{places}f} %".replace("-", "−")


def _less(value: float) -> str:
    """A reduction in words: 94.0 % less, or 3.1 % more."""
    return f"{_percent(abs(value))} {'less' if value >= 0 else 'more'}"


def _reduction(values: Sequence[float | None] | None) -> str:
    """A reduction and its interval over documents, or over blocks where there are none."""
    if not values or values[0] is None:
        return "–"
    low, high = values[3:5] if values[3] is not None else values[1:3]
    if abs(values[0]) >= 1:
        return _percent(values[0])
    return f"{_percent(values[0])} [{_percent(low).removesuffix(' %')}, {_percent(high).removesuffix(' %')}]"


def _side(values: Sequence[float | None] | None) -> str | None:
    """Whether a reduction's interval lies above 0 (less), below (more), or on both sides."""
    if not values or values[0] is None:
        return None
    low, high = values[3:5] if values[3] is not None else values[1:3]
    return "less" if low > 0 else "more" if high < 0 else None


def _and(words: Sequence[str]) -> str:
    words = list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _at(limits: Sequence[int]) -> str:
    return f" ({_and([f'{limit:,}' for limit in limits])} bytes)" if limits else ""


def _uniform_within(each: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The largest uniform policy that takes fewer bytes than the published recipe's."""
    uniform = {
        name: entry
        for name, entry in each["policies"].items()
        if entry["recipe"] == UNIFORM and entry["bytes"] < each["bytes"]
    }
    return max(uniform.items(), key=lambda item: item[1]["bytes"]) if uniform else None
