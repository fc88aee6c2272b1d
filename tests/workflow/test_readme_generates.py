"""The README's lines that generate text run as they stand, with a tiny model at their paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_models
import pytest
import tokenizers
import transformers
from click.testing import CliRunner
from models import identified

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cli import main
from kvstages.files.atomic import write_json
from kvstages.models.identity import read_identity
from kvstages.policies.making import policy_record

README = Path(__file__).parents[2] / "README.md"
WORDS = ["The", "state", "of", "the", "union", "is", "strong"]


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The README's Python, in a working directory that has what it opens: a converted model, a tokenizer, a policy."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    model = Path(re.search(r'path = "(.+)"', code)[1])
    policy = Path(re.search(r'from_policy\("(.+?)"', code)[1])
    huggingface_models.save(model)
    vocabulary = {word: index for index, word in enumerate(["<unknown>", *dict.fromkeys(WORDS)])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unknown>").save_pretrained(model)
    converted = CliRunner().invoke(main, ["convert", "--checkpoint", str(model), "--output", str(model)])
    assert converted.exit_code == 0, converted.output
    names = ["bf16", "int8", "int4"]
    grid = PrecisionGrid.of_heads([["int4", "int8"], ["bf16", "int4"], ["int8", "int8"]])
    record = policy_record(
        "greedy-0.01", "greedy", None, grid, 0.01, 0, (12, 12), 64, unit="head", ladder=names, sensitivity="made-up"
    )
    write_json(policy, identified(record, read_identity(model), names))
    return code


def test_the_lines_of_the_readme_load_a_model_and_a_policy_and_generate(
    lines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(lines.strip().splitlines()) <= 12
    found: dict[str, Any] = {}
    exec(lines, found)
    printed = capsys.readouterr().out
    assert printed.startswith("The state of the union is") and printed.endswith(" bytes\n")
    # The last token is in no cache: codes and scales of 2 tensors a head.
    stored = found["text"].shape[1] - 1
    vectors = {"int4": 6 + 2, "int8": 12 + 2, "bf16": 24}
    heads = ["int4", "int8", "bf16", "int4", "int8", "int8"]
    assert int(printed.split()[-2]) == stored * 2 * sum(vectors[name] for name in heads)
