"""What an export writes: the policy that an engine will run, and what it costs and needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstages.cache.precision_grid import PrecisionGrid, policy_bytes
from kvstages.cache.precisions import bits_of, by_size
from kvstages.export.engine import Cache, Engine, Layers, Widths, engine_bytes, projected
from kvstages.policies.engine_recipes import PROJECTED
from kvstages.policies.identity import identity_record
from kvstages.policies.making import policy_record

# How a policy came about that no allocator made.
IMPORTED = "imported"
# What a policy's record says of the scores behind it.
SCORED = ("execution", "compute_dtype")


def export(policy: Mapping[str, Any], engine: Engine) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The projected policy, the record of the export, and the text of the engine's file.

    ``policy`` is a checked record (``policies.record``). ValueError names what the engine lacks.
    """
    grid, cache = PrecisionGrid.of_record(policy["precisions"]), Cache.of_policy(policy)
    layers, formats = projected(engine, grid, cache)
    own = cache.grid(layers)
    pairs = list(zip(grid.flat(), own.flat(), strict=True))
    size = engine_bytes(layers, cache)
    record = {
        "policy": policy["policy"],
        "engine": engine.name,
        "file": engine.file,
        "formats": formats,
        "layers": [{"keys": keys.word, "values": values.word} for keys, values in layers],
        "tensors": len(pairs),
        "tensors_with_more_bits": sum(bits_of(after) > bits_of(before) for before, after in pairs),
        "tokens": cache.tokens,
        "bytes": {
            "policy": sum(policy_bytes(grid, cache.widths, cache.tokens)),
            "engine": size,
            "bf16": policy["bytes"]["bf16"],
        },
        "note": engine.note,
        "warnings": engine.warnings(layers),
    }
    made = setting_record(policy["policy"], PROJECTED, engine, layers, cache, policy.get("sensitivity"))
    identity = identity_record(policy["model"], ["bf16", *made["ladder"], *own.flat()], policy["provenance"]["scores"])
    return made | {key: policy.get(key) for key in SCORED} | identity, record, engine.text(layers)


def setting_record(
    name: str,
    allocator: str,
    engine: Engine,
    layers: Layers,
    cache: Cache,
    sensitivity: str,
    proxy: float | None = None,
) -> dict[str, Any]:
    """The record of the policy that a setting of an engine amounts to; ``sensitivity``: the source of its scores."""
    ladder = by_size(form.precision for form in engine.fitting(cache.widths))
    return _record(name, allocator, cache.grid(layers), cache, ladder, sensitivity, proxy)


def imported(name: str, grid: PrecisionGrid, widths: Widths, tokens: int) -> dict[str, Any]:
    """The record of a policy that was made elsewhere: without scores, and so without a proxy."""
    cache = Cache(len(grid.keys), len(grid.keys[0]), widths, tokens)
    record = _record(name, IMPORTED, grid, cache, by_size(["bf16", *grid.flat()]), None, None)
    return record | dict.fromkeys(SCORED)


def _record(
    name: str,
    allocator: str,
    grid: PrecisionGrid,
    cache: Cache,
    ladder: Sequence[str],
    sensitivity: str | None,
    proxy: float | None,
) -> dict[str, Any]:
    return policy_record(
        name, allocator, None, grid, proxy, 0, cache.widths, cache.tokens,
        unit="layer", ladder=ladder, sensitivity=sensitivity,
    )  # fmt: skip
