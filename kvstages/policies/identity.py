"""What a file of policies says of itself: the version of its form, the model it was made for, and its schemes.

A policy is an answer for one model. Its numbers mean nothing for another one, even of the same shape, so every stage
that takes a policy, and the cache for ``generate()``, refuses a policy of another model (docs/files.md, "Policies").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kvstages import __version__
from kvstages.cache.precisions import by_size
from kvstages.cache.schemes import precision
from kvstages.models.identity import MODEL_KEYS, ModelIdentity

# The version of the form of policy files; to be raised when a key changes its meaning.
SCHEMA_VERSION = 1


def scheme_record(name: str) -> dict[str, Any]:
    """A precision in full: bits, and for keys and for values every option of its method, the rule of its scales among
    them (docs/schemes.md)."""
    if name == "bf16":
        return {"bits": 16}
    found = precision(name)
    return {"bits": found.bits, "keys": asdict(found.keys), "values": asdict(found.values)}


def identity_record(model: Mapping[str, Any], names: Iterable[str], scores: Mapping[str, str]) -> dict[str, Any]:
    """The keys that identify a file of policies of these precisions.

    ``model``: what it says of the model (``ModelIdentity.as_record``); ``scores``: sha256 of each source's table.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "model": dict(model),
        "schemes": {name: scheme_record(name) for name in by_size(names)},
        "provenance": {"kvstages": __version__, "scores": dict(scores)},
    }


def check_identity(record: Mapping[str, Any], model: ModelIdentity | None) -> None:
    """ValueError where a file of policies is of another form, or for another model or shape, or where its precisions
    are not what they are called here. ``model``: None leaves the model aside."""
    version = record.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ValueError(
            f"schema_version is {version!r:.60}, expected {SCHEMA_VERSION}: made by another version of kvstages; "
            "allocate it again"
        )
    check_schemes(record.get("schemes"))
    check_model(record.get("model"), model)


def check_schemes(schemes: Any) -> None:
    """ValueError unless every precision of a file is the scheme that has its name here."""
    if not isinstance(schemes, Mapping):
        raise ValueError("key 'schemes' is missing, expected the scheme of each precision")
    for name, found in schemes.items():
        expected = scheme_record(name)
        if found != expected:
            raise ValueError(f"schemes.{name} is {found!r:.120}, but {name} is {expected!r:.120} here")


def check_model(found: Any, model: ModelIdentity | None) -> None:
    """ValueError unless a file's record of its model is of ``model``, or of the one that it is an adapted copy of."""
    if not isinstance(found, Mapping) or set(found) != set(MODEL_KEYS):
        raise ValueError(f"model: expected {', '.join(MODEL_KEYS)}")
    if model is None:
        return
    expected = model.as_record()
    differing = [name for name in expected if name != "weights" and found[name] != expected[name]]
    if differing:
        shapes = (", ".join(f"{name} {each[name]}" for name in differing) for each in (found, expected))
        raise ValueError("made for a model with {}; this one has {}".format(*shapes))
    if found["weights"] not in (model.weights, model.origin):
        raise ValueError(
            f"made for another model of this shape (digest of its weights {found['weights']!s:.12}..., this one's "
            f"{model.weights:.12}...)"
        )
