"""What the restrictions of engines cost: policies in an engine's words beside those that it cannot express."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.joint_table import compared, read_joint, with_figures
from kvstages.policies.engine_recipes import AT_OWN_BYTES, OWN, PROJECTED
from kvstages.policies.names import ENGINES
from kvstages.stats.bootstrap import ratio_of_means

if TYPE_CHECKING:
    import pandas as pd


def engines(path: Path) -> pd.DataFrame:
    """One row for each policy of the set of the stage engine-set, from its joint.csv.

    ``engine`` is empty for the policy itself; ``kind`` is own, projected, allocated, layer or allocated-own.
    ``with_figures`` of each, and ``times_less``: the joint KL at the same bytes over its own, paired over the same
    blocks: that of the same engine's projected policy, for allocated-own that of the policy itself; empty for these
    two, and where its own KL may be 0. ValueError names ``path`` and a recipe that is no engine's, an engine without a
    projected policy, or no own one.
    """
    import pandas as pd

    joint = read_joint(path)
    names = [_split(path, recipe) for recipe in joint.policies["recipe"]]
    places = {pair: place for place, pair in enumerate(names)}
    kl, rows = joint.metrics["mean_kl"], []
    for place, (engine, kind) in enumerate(names):
        base = (None, OWN) if engine is None or kind == AT_OWN_BYTES else (engine, PROJECTED)
        if base not in places:
            raise ValueError(f"{path}: no policy of the recipe {'-'.join(filter(None, base))}")
        against = None if (engine, kind) in (base, (engine, PROJECTED)) else kl[places[base]]
        rows.append(compared("times_less", ratio_of_means, against, kl[place], joint.documents))
    table = pd.concat([with_figures(joint), pd.DataFrame(rows)], axis=1)
    table["engine"], table["kind"] = zip(*names, strict=True)
    return table


def _split(path: Path, recipe: str) -> tuple[str | None, str]:
    """Engine and kind of a recipe."""
    if recipe == OWN:
        return None, OWN
    for engine in ENGINES:
        if recipe.startswith(f"{engine}-"):
            return engine, recipe.removeprefix(f"{engine}-")
    raise ValueError(f"{path}: recipe {recipe}, expected {OWN} or one of an engine: {', '.join(ENGINES)}")
