"""The engines by name."""

from __future__ import annotations

from kvstages.export.engine import Engine
from kvstages.export.ik_llama_cpp import IkLlamaCpp
from kvstages.export.kvtuner import KVTuner
from kvstages.export.llama_cpp import LlamaCpp
from kvstages.export.modelopt import ModelOpt
from kvstages.export.vllm import VLLM

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (VLLM(), ModelOpt(), LlamaCpp(), IkLlamaCpp(), KVTuner())
}
