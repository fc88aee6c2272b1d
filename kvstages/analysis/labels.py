"""Words that figures and tables share for what they show."""

from __future__ import annotations

# A unit's part of a head, by itself, and after the name of a precision or a source.
PART_LABELS = {"kv": "keys and values", "k": "keys", "v": "values"}
PART_SUFFIXES = {"kv": "", "k": ", keys", "v": ", values"}
