"""Token shards: 256 little-endian int32 (magic, version, count, zeros), then the ids, little-endian.

Ids are uint16 in version 1, and uint32 in version 2, which has room for vocabularies above 65,536.

docs/method.md, "Token shard".
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvstages.files import ledger
from kvstages.files.atomic import write_bytes

MAGIC = 20250320
VERSION, WIDE = 1, 2
IDS = {VERSION: np.dtype("<u2"), WIDE: np.dtype("<u4")}
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS


def write_shard(path: Path, tokens: np.ndarray, version: int = VERSION) -> None:
    """Write token ids (one axis, each below 65,536, or 2^32 in version 2) as a shard; ValueError if one is not."""
    tokens, largest = np.asarray(tokens), np.iinfo(IDS[version]).max
    whole = np.issubdtype(tokens.dtype, np.integer) or not tokens.size
    if tokens.ndim != 1 or not whole or (tokens.size and not 0 <= tokens.min() <= tokens.max() <= largest):
        raise ValueError(f"{path}: a shard holds one row of token ids from 0 to {largest}")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, version, len(tokens)
    write_bytes(path, header.tobytes() + tokens.astype(IDS[version]).tobytes())


def read_shard(path: Path) -> np.ndarray:
    """Token ids of a shard, uint16 or uint32 [tokens]; ValueError on another magic, version or length.

    The ids are mapped, not read: a window touches only its own pages of a large shard.
    """
    path = Path(path)
    ledger.note(path)
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise ValueError(f"{path}: {size} bytes, but a token shard opens with a header of {HEADER_BYTES}")
    magic, version, count = (int(value) for value in np.fromfile(path, dtype="<i4", count=3))
    if magic != MAGIC:
        raise ValueError(f"{path}: magic {magic}, expected {MAGIC}: not a token shard")
    if version not in IDS:
        raise ValueError(f"{path}: shard version {version}, expected {VERSION} or {WIDE}")
    expected = HEADER_BYTES + IDS[version].itemsize * count
    if count < 0 or size != expected:
        raise ValueError(f"{path}: {size} bytes, but its header announces {count} tokens, {expected} bytes")
    if count == 0:
        return np.zeros(0, dtype=IDS[version])
    return np.memmap(path, dtype=IDS[version], mode="r", offset=HEADER_BYTES, shape=(count,))
