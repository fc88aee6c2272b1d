"""Tokenizers of Hugging Face's models: from a model's folder or GGUF file, without network and without its code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from kvstages.files import ledger
from kvstages.models.huggingface import first_line
from kvstages.models.huggingface_files import alone, arguments

# Files of a tokenizer, of whatever kind; a folder has some of them.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)


class Tokenizer:
    """The tokenizer in a folder or a GGUF file; ValueError where there is none, or one that needs code of its own."""

    def __init__(self, path: Path):
        self.path = path
        files = [path] if path.is_file() else [path / name for name in FILES if (path / name).is_file()]
        if not files:
            raise ValueError(f"{path}: no tokenizer in it; expected tokenizer.json, or the older files of one")
        for file in files:
            ledger.note(file)
        try:
            with alone():
                self.tokenizer = transformers.AutoTokenizer.from_pretrained(
                    **arguments(path), local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # a damaged file makes the library raise in as many ways as there are kinds
            raise ValueError(f"{path}: transformers cannot open its tokenizer: {first_line(error)}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text by itself, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    @property
    def prefix(self) -> list[int]:
        """Special tokens that the tokenizer puts before a text unless told otherwise, such as one for its beginning."""
        probe = self.encode("a")
        whole = self.tokenizer("a", verbose=False)["input_ids"]
        places = [place for place in range(len(whole)) if whole[place : place + len(probe)] == probe]
        return whole[: places[0]] if places else []

    def check(self, vocabulary: int, ids: Any) -> None:
        """ValueError where the tokenizer belongs to another model: more tokens than there are in the vocabulary."""
        known, highest = self.tokenizer.vocab_size, max(ids, default=0)
        if known > vocabulary or highest >= vocabulary:
            found = f"{known} tokens" if known > vocabulary else f"the token id {highest}"
            raise ValueError(
                f"{self.path}: its tokenizer has {found}, but the model's vocabulary is {vocabulary}: "
                "it belongs to another model"
            )

    def record(self) -> dict[str, Any]:
        """What is to be known of token ids that it made: its class, its size, and the special tokens before a block."""
        prefix = self.prefix
        return {
            "tokenizer": type(self.tokenizer).__name__,
            "transformers": transformers.__version__,
            "tokens": len(self.tokenizer),
            "prefix": prefix,
            "prefix_tokens": self.tokenizer.convert_ids_to_tokens(prefix),
        }
