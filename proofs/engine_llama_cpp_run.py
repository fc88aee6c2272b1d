"""One side of proofs/engine_llama_cpp.py: llama.cpp's logits with caches of several types, run where it is installed.

Arguments: the GGUF file, a JSON list of texts, the tokens of a block, the threads, and a folder to write to. Writes
tokens.json; and for the file as it is (``stored``) and with its weights made FP32 (``fp32``) a file of each setting's
KL from the same weights' run with an F16 cache, KL(F16 || setting) in nats [blocks, tokens], and that run's logits.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import llama_cpp
import numpy as np

# Name: cache type, rotation off, flash attention. Quantized values need flash attention.
SETTINGS = {
    "f16-plain-attention": ("F16", False, False),
    "q8_0-hadamard": ("Q8_0", False, True),
    "q8_0": ("Q8_0", True, True),
    "q4_0-hadamard": ("Q4_0", False, True),
    "q4_0": ("Q4_0", True, True),
}


def without_repacking() -> None:
    """Weights stay as the file has them: repacked for AMX, Q4_1 ended with a segmentation fault here (0.3.36)."""
    default = llama_cpp.llama_cpp.llama_model_default_params

    def parameters() -> llama_cpp.llama_model_params:
        found = default()
        found.use_extra_bufts = False
        return found

    llama_cpp.llama_cpp.llama_model_default_params = parameters


def opened(gguf: Path, tokens: int, threads: int, kind: str, plain: bool, flash: bool) -> llama_cpp.Llama:
    """A model whose context has keys and values of a type; all tokens of a block go through in one batch."""
    os.environ["LLAMA_ATTN_ROT_DISABLE"] = str(int(plain))
    number = getattr(llama_cpp, f"GGML_TYPE_{kind}")
    return llama_cpp.Llama(
        str(gguf), n_ctx=tokens, n_batch=tokens, n_ubatch=tokens, n_threads=threads, n_threads_batch=threads,
        logits_all=True, type_k=number, type_v=number, flash_attn=flash, verbose=False,
    )  # fmt: skip


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities, FP64 [T, V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def block_logits(model: llama_cpp.Llama, tokens: list[int]) -> np.ndarray:
    """Logits of every position of a block, FP32 [T, V]; the cache is emptied first."""
    model.reset()
    model.eval(tokens)
    return np.array(model.scores[: len(tokens)], dtype=np.float32)


def as_fp32(gguf: Path, output: Path) -> Path:
    """The file with its weights made FP32 by llama.cpp itself."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
    done = llama_cpp.llama_model_quantize(str(gguf).encode(), str(output).encode(), ctypes.byref(parameters))
    if done:
        raise RuntimeError(f"llama_model_quantize ended with {done}")
    return output


def main() -> None:
    gguf, texts, length, threads, folder = sys.argv[1:]
    length, threads, folder = int(length), int(threads), Path(folder)
    without_repacking()
    model = opened(Path(gguf), length, threads, "F16", False, True)
    blocks = [model.tokenize(text.encode(), add_bos=False)[:length] for text in json.loads(Path(texts).read_text())]
    del model
    if any(len(block) < length for block in blocks):
        raise ValueError(f"a text has fewer than {length} tokens")
    (folder / "tokens.json").write_text(json.dumps(blocks))
    files = {"stored": Path(gguf), "fp32": as_fp32(Path(gguf), folder / "fp32.gguf")}
    for weights, path in files.items():
        model = opened(path, length, threads, "F16", False, True)
        reference = np.stack([block_logits(model, block) for block in blocks])
        del model
        np.save(folder / f"{weights}-f16.npy", reference)
        found = {}
        for name, setting in SETTINGS.items():
            model = opened(path, length, threads, *setting)
            found[name] = []
            for block, own in zip(blocks, reference, strict=True):
                before, after = log_softmax(own), log_softmax(block_logits(model, block))
                found[name].append((np.exp(before) * (before - after)).sum(axis=1).tolist())
            del model
            print(weights, name, float(np.mean(found[name])), flush=True)
        (folder / f"{weights}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
