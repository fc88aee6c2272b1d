"""Text files as documents, and their tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstages.study.texts import Text, encode_texts, read_texts, split_text


@given(st.text("ab \n", max_size=200), st.integers(1, 9))
def test_the_parts_of_a_text_are_the_text(text: str, parts: int) -> None:
    found = split_text(text, parts)
    assert len(found) <= parts and all(piece.strip() for piece in found)
    assert "".join("".join(found).split()) == "".join(text.split())


def test_a_text_is_cut_at_the_end_of_a_paragraph() -> None:
    assert split_text("one two.\n\nthree four.\n\nfive six.", 2) == ["one two.\n\n", "three four.\n\nfive six."]
    assert split_text("one two three four", 2) == ["one two ", "three four"]
    assert split_text("onetwothreefour", 3) == ["onetw", "othre", "efour"]


def test_files_are_documents_or_parts(tmp_path: Path) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text("\ufeffUn début.\n\nUne fin.", encoding="utf-8")
    assert read_texts(paths) == [Text("a.txt", "Un début.\n\nUne fin."), Text("b.txt", "Un début.\n\nUne fin.")]
    assert [name for name, _ in read_texts(paths, 2)] == ["a.txt/1", "a.txt/2", "b.txt/1", "b.txt/2"]


def test_tokens_of_documents_follow_each_other() -> None:
    ids, entries = encode_texts([Text("a", "xyz"), Text("b", "x")], lambda text: [ord(letter) for letter in text])
    assert np.array_equal(ids, [120, 121, 122, 120])
    assert entries == [{"document": "a", "start": 0, "end": 3}, {"document": "b", "start": 3, "end": 4}]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty, expected a text"),
        (b" \n", "empty, expected a text"),
        (b"GGUF\x03\x00\x00", "not text: it holds a zero byte at 5"),
        (b"caf\xe9", r"not UTF-8 text \(byte 0xe9 at 3\)"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected) as caught:
        read_texts([path])
    assert str(caught.value).startswith(f"{path}: ")
