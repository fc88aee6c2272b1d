"""The arms of an adaptation, as a study's configuration names them.

An entry says what training does to the cache (``noise`` or ``straight-through`` with a policy; neither is a control),
the ``weights``' number format, the ``order`` of the batches (``sequential``, or ``shuffled`` by the seed), the
``seeds``, and the settings: ``steps``, ``learning_rate`` and ``beta``, each a number or a list to choose from on the
reserved window; or ``settings_of`` another arm. ``control`` names the arm that it is compared with, seed by seed.
Imports nothing of the configuration's checks, which use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CACHES = ("noise", "straight-through")
SETTINGS = ("steps", "learning_rate", "beta")
ORDERS = SEQUENTIAL, SHUFFLED = "sequential", "shuffled"
# The model before training, where arms are named.
ORIGINAL = "original"

Arm = Mapping[str, Any]


def cache_of(arm: Arm) -> tuple[str, str] | None:
    """What training does to the cache, and by which policy; None for a control."""
    return next(((name, arm[name]) for name in CACHES if name in arm), None)


def settings_arm(arms: Mapping[str, Arm], name: str) -> str:
    """The arm whose settings an arm takes: its own name, or that under ``settings_of``."""
    return arms[name].get("settings_of", name)


def has_grid(arm: Arm) -> bool:
    """Whether an arm's settings are chosen from several."""
    return any(isinstance(arm.get(key), list) for key in SETTINGS)


def check_arms(arms: Mapping[str, Arm], where: str) -> None:
    """ValueError where entries, each right by itself, do not fit together."""
    for name, arm in arms.items():
        at = f"{where}.{name}"
        cache = cache_of(arm)
        if all(key in arm for key in CACHES):
            raise ValueError(f"{at}: {' and '.join(CACHES)}, expected one of them at most")
        if "settings_of" in arm and any(key in arm for key in SETTINGS):
            raise ValueError(f"{at}: settings_of beside settings of its own, expected one of both")
        missing = [key for key in SETTINGS if key not in arm]
        if "settings_of" not in arm and missing:
            raise ValueError(f"{at}.{missing[0]}: missing")
        if "noise" not in arm and arm["order"] == SEQUENTIAL and len(arm["seeds"]) > 1:
            raise ValueError(
                f"{at}.seeds: {len(arm['seeds'])} of them, but nothing is drawn without noise in a sequential order; "
                "expected one"
            )
        if has_grid(arm) and cache is None:
            raise ValueError(
                f"{at}: several settings, but a control has no policy to choose them by; expected one of each"
            )
        source = settings_arm(arms, name)
        if source not in arms or "settings_of" in arms[source]:
            raise ValueError(f"{at}.settings_of: {source}, expected an arm with settings of its own")
    for name in arms:
        if "control" in arms[name]:
            _check_control(arms, name, f"{where}.{name}")


def _check_control(arms: Mapping[str, Arm], name: str, at: str) -> None:
    arm, called = arms[name], arms[name]["control"]
    if cache_of(arm) is None:
        raise ValueError(f"{at}.control: {called}, but an arm with neither {' nor '.join(CACHES)} is a control itself")
    if called not in arms or cache_of(arms[called]) is not None:
        raise ValueError(f"{at}.control: {called}, expected an arm with neither {' nor '.join(CACHES)}")
    control = arms[called]
    same_source = settings_arm(arms, called) == settings_arm(arms, name)
    own, other = ({key: given.get(key) for key in SETTINGS} for given in (arm, control))
    same = all(arm[key] == control[key] for key in ("weights", "order"))
    if not (same and (same_source or (own == other and own["steps"] is not None))):
        raise ValueError(f"{at}.control: {called} has other weights, order or settings, expected the same of both")
    if arm["order"] == SHUFFLED and set(arm["seeds"]) != set(control["seeds"]):
        raise ValueError(f"{at}.control: {called} has other seeds, expected those of {name}: orders are paired by them")
