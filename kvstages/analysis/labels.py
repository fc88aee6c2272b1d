"""Words that figures and tables share for what they show."""

from __future__ import annotations

# A unit's part of a head, or a layer, by itself, and after the name of a precision or a source.
PART_LABELS = {"kv": "keys and values", "k": "keys", "v": "values", "layer": "all heads of a layer"}
PART_SUFFIXES = {"kv": "", "k": ", keys", "v": ", values", "layer": ", whole layers"}
