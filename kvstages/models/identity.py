"""Which model it is: its shape, and a digest of its weights that does not depend on how they are stored.

The digest is the same for a file and for the model that was opened from it, in BF16, FP32 or FP64, on any device, in
one file or several, whatever its tensors are called. It takes every value of a tensor that has at most ``SAMPLE``, and
``SAMPLE`` evenly spaced ones of a larger tensor: training changes nearly all values, and the models that people use
take seconds to read as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstages.files.read import read_arrays, read_json
from kvstages.models.config import RECORD, DecoderShape, is_huggingface, model_folder, read_shape

if TYPE_CHECKING:
    import numpy as np

SAMPLE = 1 << 16
# What a policy says of its model.
MODEL_KEYS = ("layers", "heads", "key_width", "value_width", "weights")
# Under this key a model of this project says of which it is an adapted copy, by the digest of that one's weights.
ORIGIN = "adapted_from"
# In files of this project, and no weights: the positions, which are a formula.
NO_WEIGHTS = ("pos_embedding",)


class Sample(NamedTuple):
    """The shape of a tensor and the values that its digest is made of, as the bits of BF16 (uint16)."""

    shape: Sequence[int]
    bits: np.ndarray


@dataclass(frozen=True)
class ModelIdentity:
    """A model: its shape, the digest of its weights, and that of the model of which it is an adapted copy."""

    shape: DecoderShape
    weights: str
    origin: str | None = None

    def as_record(self) -> dict[str, Any]:
        """What a policy says of the model that it was made for."""
        return {**{name: getattr(self.shape, name) for name in MODEL_KEYS[:-1]}, "weights": self.weights}


def step(size: int) -> int:
    """Every how many values of a tensor of ``size`` its digest takes one."""
    return max(1, -(-size // SAMPLE))


def weights_digest(samples: Iterable[Sample]) -> str:
    """sha256 over the digests of all tensors, sorted; a tensor's is over its shape and the bits of its sample."""
    each = []
    for shape, bits in samples:
        digest = hashlib.sha256(" ".join(map(str, shape)).encode() + b"\n")
        digest.update(bits.astype("<u2").tobytes())
        each.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(each))).hexdigest()


def sample(array: np.ndarray) -> Sample:
    """The sample of an array of FP32: rounded to BF16, half to even."""
    import numpy as np

    values = np.ascontiguousarray(array.reshape(-1)[:: step(array.size)], dtype="<f4").view("<u4")
    return Sample(array.shape, ((values + 0x7FFF + (values >> 16 & 1)) >> 16).astype("<u2"))


def read_identity(path: Path) -> ModelIdentity:
    """The identity of a model.safetensors of this project, or of a folder with one of Hugging Face's; no torch.

    ValueError names the path and what is wrong with it.
    """
    import numpy as np

    shape, path = read_shape(path), model_folder(path)
    if not is_huggingface(path):
        with np.errstate(over="ignore"):  # of the sums that look for NaN
            arrays, record = read_arrays(path)
        weights = [array for name, array in arrays.items() if name not in NO_WEIGHTS]
        return ModelIdentity(shape, weights_digest(map(sample, weights)), record.get(ORIGIN))
    weights = read_json(path / RECORD).get("weights")
    digest = weights.get("digest") if isinstance(weights, Mapping) else None
    if not isinstance(digest, str):
        raise ValueError(f"{path / RECORD}: no digest of the weights; make it again with `kvstages convert`")
    return ModelIdentity(shape, digest)
