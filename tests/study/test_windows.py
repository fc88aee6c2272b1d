"""Windows: cut as they are written, drawn evenly from documents, and refused by name."""

import csv
import dataclasses
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstages.cli import main
from kvstages.files.atomic import write_tensors
from kvstages.files.read import read_tensors
from kvstages.models.config import GPTConfig
from kvstages.study.documents import Document, draw_blocks, read_documents
from kvstages.study.shards import WIDE, write_shard
from kvstages.study.windows import (
    Blocks,
    Draw,
    Stretch,
    check_lengths,
    check_tokens,
    check_windows,
    cut_shorter,
    cut_windows,
    load_window,
    parse_windows,
    window_documents,
    window_of,
)

CONFIG = GPTConfig(vocab_size=50, context_len=16, embedding_dim=4, num_layers=1, num_heads=2)


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard.bin"
    write_shard(path, np.arange(100) % 50)
    return path


@pytest.fixture
def model(tmp_path):
    """A file with the shape of a model in its header, which is all that the stage reads."""
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"any": torch.zeros(1)}, {"config": CONFIG.as_dict()})
    return path


def run(shard, model, output, *windows, block=8, documents=None, lengths=()):
    arguments = ["windows", "--shard", shard, "--model", model, "--block", block, "--output", output]
    arguments += ["--places", output.with_suffix(".csv")]
    arguments += [part for window in windows for part in ("--window", window)]
    arguments += [part for length in lengths for part in ("--cut", length)]
    arguments += [] if documents is None else ["--documents", documents]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_command_cuts_blocks_in_order(shard, model, tmp_path):
    output = tmp_path / "windows.safetensors"
    result = run(shard, model, output, "calibration=0:16", "validation=40:64")
    assert (result.exit_code, result.output) == (0, "")
    tensors, record = read_tensors(output)
    places = {"calibration": [0, 8], "validation": [40, 48, 56]}
    assert record["block"] == 8
    assert record["windows"] == {name: {"starts": own, "documents": None} for name, own in places.items()}
    assert output.with_suffix(".csv").read_text().splitlines()[:2] == [
        "window,block,document,start",
        "calibration,0,,0",
    ]
    assert window_documents(output, "validation") is None
    assert tensors["calibration"].tolist() == [list(range(8)), list(range(8, 16))]
    assert tensors["validation"].dtype == torch.int64
    assert tensors["validation"].flatten().tolist() == [position % 50 for position in range(40, 64)]
    assert torch.equal(load_window(output, "validation"), tensors["validation"])
    with pytest.raises(ValueError, match=r"no window 'valid'; it holds calibration, validation"):
        load_window(output, "valid")


def test_a_window_cut_for_another_model_is_refused(shard, model, tmp_path):
    path = tmp_path / "windows.safetensors"
    run(shard, model, path, "validation=40:56")
    assert torch.equal(load_window(path, "validation", CONFIG.shape), load_window(path, "validation"))
    shorter = dataclasses.replace(CONFIG.shape, context=7)
    with pytest.raises(ValueError, match=r"windows\.safetensors: blocks of 8 tokens are longer than .* context of 7"):
        load_window(path, "validation", shorter)
    smaller = dataclasses.replace(CONFIG.shape, vocabulary=49)
    with pytest.raises(ValueError, match=r"windows\.safetensors: token id 49 is outside the model's vocabulary of 49"):
        load_window(path, "validation", smaller)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[3, -1]]), "token id -1 is outside the model's vocabulary of 50"),
        (torch.zeros(2, 8), r"a tensor \(2, 8\) of torch.float32, expected token ids \[blocks, block\]"),
        (torch.zeros(8, dtype=torch.int64), r"a tensor \(8,\) of torch.int64, expected token ids"),
        (torch.zeros(0, 8, dtype=torch.int64), r"a tensor \(0, 8\) of torch.int64, expected token ids"),
    ],
)
def test_what_are_no_token_blocks_is_refused(tokens, message):
    with pytest.raises(ValueError, match=f"w.safetensors: {message}"):
        check_tokens(tokens, CONFIG.shape, Path("w.safetensors"))


def test_command_is_byte_stable(shard, model, tmp_path):
    for name in ("a", "b"):
        run(shard, model, tmp_path / name, "calibration=0:16", "validation=40:64")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_windows_may_touch_and_end_with_the_shard(shard):
    cut = cut_windows(shard, {"one": Stretch(0, 48), "two": Stretch(48, 96)}, 16, CONFIG.shape)
    assert [own.tokens.shape for own in cut.values()] == [(3, 16), (3, 16)]
    assert np.concatenate([own.tokens.ravel() for own in cut.values()]).tolist() == [i % 50 for i in range(96)]


@pytest.mark.parametrize(
    ("windows", "block", "expected"),
    [
        (["b=16:32", "a=0:16"], 8, "window a (0 to 16) starts before b ends at 32"),
        (["a=0:16", "b=8:24"], 8, "window b (8 to 24) starts before a ends at 16"),
        (["a=0:12"], 8, "window a (0 to 12) holds 12 tokens, not a multiple of the block of 8"),
        (["a=-8:8"], 8, "window a (-8 to 8) starts before the shard"),
        (["a=8:8"], 8, "window a (8 to 8) is empty"),
        (["a=16:8"], 8, "window a (16 to 8) is empty"),
        (["a=0:104"], 8, "window a ends at 104, past the shard's 100 tokens"),
        (["a=0:34"], 17, "block of 17 tokens is longer than the model's context of 16"),
        (["a=0:8"], 1, "block of 1 tokens: expected at least 2"),
        (["a=0:8", "a=8:16"], 8, "window a is given twice"),
        (["a=documents:3,blocks:2,seed:0"], 8, "window a: 2 blocks of 3 documents, expected at least one document and"),
        (["a=documents:0,blocks:2,seed:0"], 8, "window a: 2 blocks of 0 documents, expected at least one document and"),
        (["a=documents:1,blocks:2,seed:0"], 8, "a window is drawn from documents, but no documents file is given"),
        (["a=0-8"], 8, "window 'a=0-8': expected NAME=START:END, such as calibration=0:512, or NAME=documents:16,"),
    ],
)
def test_wrong_windows(shard, model, tmp_path, windows, block, expected):
    result = run(shard, model, tmp_path / "out" / "windows.safetensors", *windows, block=block)
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    assert expected in result.output
    assert not (tmp_path / "out").exists()


def test_token_beyond_the_vocabulary_names_id_position_and_window(tmp_path, model):
    tokens = np.arange(100) % 50
    tokens[[37, 38]] = 51, 60
    write_shard(tmp_path / "shard.bin", tokens)
    result = run(tmp_path / "shard.bin", model, tmp_path / "out", "a=0:16", "b=32:40")
    assert result.exit_code == 1
    assert "token id 51 at position 37 (window b) is not below the model's vocabulary of 50" in result.output
    assert not (tmp_path / "out").exists()


def test_ids_outside_the_windows_do_not_matter(tmp_path):
    tokens = np.full(32, 60000)
    tokens[8:16] = 49
    write_shard(tmp_path / "shard.bin", tokens)
    cut = cut_windows(tmp_path / "shard.bin", {"a": Stretch(8, 16)}, 8, CONFIG.shape)
    assert cut["a"].tokens.tolist() == [[49] * 8]


def test_wrong_shard_and_wrong_model(shard, model, tmp_path):
    result = run(model, model, tmp_path / "out", "a=0:8")
    assert result.exit_code == 1
    assert "not a token shard" in result.output or "but a token shard opens with" in result.output
    result = run(shard, shard, tmp_path / "out", "a=0:8")
    assert (result.exit_code, result.output) == (1, f"Error: {shard}: not a safetensors file, or a truncated one\n")
    write_tensors(tmp_path / "bare.safetensors", {"any": torch.zeros(1)})
    result = run(shard, tmp_path / "bare.safetensors", tmp_path / "out", "a=0:8")
    assert "no model configuration in its header; make it with `kvstages convert`" in result.output
    assert not (tmp_path / "out").exists()


def test_parse_keeps_the_order_given():
    parsed = parse_windows(["b=0:8", "a=documents:2,blocks:3,seed:7"])
    assert list(parsed.items()) == [("b", Stretch(0, 8)), ("a", Draw(2, 3, 7))]
    assert {name: f"{name}={window}" for name, window in parsed.items()} == {
        "b": "b=0:8",
        "a": "a=documents:2,blocks:3,seed:7",
    }


def test_check_windows_accepts_the_published_ones():
    published = json.loads('{"c": [0, 512], "a": [512, 4096], "r": [4096, 5120], "v": [9000000, 9002048]}')
    check_windows({name: window_of(ends) for name, ends in published.items()}, 64)


@pytest.fixture
def documents(tmp_path):
    """Ten documents of 10 tokens each, of the shard's 100: one block of 8 each."""
    return write_documents(tmp_path, [10] * 10)


def write_documents(folder, lengths):
    ends = np.cumsum(lengths).tolist()
    entries = [
        {"document": f"text-{index}", "start": end - length, "end": end}
        for index, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    (folder / "documents.json").write_text(json.dumps(entries))
    return folder / "documents.json"


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(4, 40), min_size=3, max_size=12),
    count=st.integers(1, 4),
    extra=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_draws_take_whole_blocks_evenly_from_documents(lengths, count, extra, seed):
    ends = np.cumsum(lengths).tolist()
    documents = [Document(f"{i}", e - n, e) for i, (n, e) in enumerate(zip(lengths, ends, strict=True))]
    blocks, block = count + extra, 4
    most = -(-blocks // count)
    if sum(length >= most * block for length in lengths) < count:
        with pytest.raises(ValueError, match="documents left are long enough"):
            draw_blocks(documents, count, blocks, block, seed)
        return
    taken = draw_blocks(documents, count, blocks, block, seed)
    assert taken == draw_blocks(documents[::-1], count, blocks, block, seed)
    starts = [start for _, start in taken]
    assert len(starts) == blocks and starts == sorted(starts)
    assert all(later - earlier >= block for earlier, later in pairwise(starts))
    assert all(own.start <= start and start + block <= own.end for own, start in taken)
    shares = Counter(own for own, _ in taken).values()
    assert len(shares) == count and max(shares) - min(shares) <= 1


def test_the_draw_depends_on_the_seed_and_every_document_is_drawn_alike_often():
    documents = [Document(f"text-{index}", 100 * index, 100 * index + 100) for index in range(10)]
    drawn = Counter(own.name for seed in range(300) for own, _ in draw_blocks(documents, 3, 3, 8, seed))
    assert set(drawn) == {document.name for document in documents} and min(drawn.values()) > 60  # 90 each, one sigma 8
    places = Counter(start % 100 for seed in range(300) for _, start in draw_blocks(documents, 3, 3, 8, seed))
    assert sorted(places) == list(range(0, 96, 8)) and min(places.values()) > 45  # 75 each


def test_no_document_serves_two_windows_and_the_record_says_where_each_block_came_from(
    shard, model, documents, tmp_path
):
    output = tmp_path / "windows.safetensors"
    drawn = ["validation=documents:4,blocks:4,seed:1", "calibration=documents:3,blocks:3,seed:1"]
    result = run(shard, model, output, "adaptation=16:24", *drawn, documents=documents)
    assert (result.exit_code, result.output) == (0, "")
    tensors, record = read_tensors(output)
    names = {name: window_documents(output, name) for name in ("validation", "calibration")}
    both = names["validation"] + names["calibration"]
    # The run of positions lies in documents 1 and 2: no draw takes these.
    assert len(set(both)) == 7 and not {"text-1", "text-2"} & set(both)
    for name, window in tensors.items():
        for ids, start in zip(window.tolist(), record["windows"][name]["starts"], strict=True):
            assert ids == [position % 50 for position in range(start, start + 8)]
    rows = list(csv.DictReader(output.with_suffix(".csv").open()))
    assert [row["document"] for row in rows] == ["", *both]
    assert [int(row["start"]) for row in rows[1:]] == [10 * int(name.removeprefix("text-")) for name in both]
    # The first window's draw does not depend on what follows it.
    run(shard, model, tmp_path / "other", "adaptation=16:24", drawn[0], documents=documents)
    assert window_documents(tmp_path / "other", "validation") == names["validation"]


def test_too_few_documents_are_refused_by_name(shard, model, documents, tmp_path):
    drawn = ["a=documents:8,blocks:8,seed:0", "b=documents:3,blocks:3,seed:0"]
    result = run(shard, model, tmp_path / "out", *drawn, documents=documents)
    assert (result.exit_code, len(result.output.splitlines())) == (1, 1)
    assert "documents.json: window b: 2 of 2 documents left are long enough for 1 blocks of 8 tokens" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "expected a list of documents"),
        ([], "expected a list of documents"),
        ([{"document": "a", "start": 0}], r"documents\[0\]: expected the keys document, start and end"),
        ([{"document": "", "start": 0, "end": 4}], r"documents\[0\]: document '', expected a name"),
        (
            [{"document": "a", "start": 0, "end": True}],
            r"documents\[0\] \(a\): from 0 to True, expected token positions",
        ),
        ([{"document": "a", "start": 4, "end": 4}], r"\(a\): from 4 to 4, expected positions from 0 to 100, in order"),
        ([{"document": "a", "start": 0, "end": 101}], r"\(a\): from 0 to 101, expected positions from 0 to 100"),
        (
            [{"document": "a", "start": 0, "end": 8}, {"document": "b", "start": 7, "end": 9}],
            r"documents\[1\] \(b\): from 7 to 9, expected positions from 8 to 100, in order",
        ),
        (
            [{"document": "a", "start": 0, "end": 8}, {"document": "a", "start": 8, "end": 9}],
            "a second document of the",
        ),
    ],
)
def test_wrong_documents(entries, said, tmp_path):
    (tmp_path / "documents.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=rf"documents\.json: .*{said}|documents\.json: {said}"):
        read_documents(tmp_path / "documents.json", 100)


WIDER = dataclasses.replace(CONFIG.shape, vocabulary=60)


def test_a_window_may_have_a_block_of_its_own_and_blocks_may_start_with_special_tokens(tmp_path):
    shard, documents = tmp_path / "shard.bin", tmp_path / "documents.json"
    write_shard(shard, np.arange(40), WIDE)
    entries = [{"document": name, "start": start, "end": start + 20} for name, start in (("a", 0), ("b", 20))]
    documents.write_text(json.dumps(entries))
    wanted = parse_windows(["long=documents:1,blocks:2,seed:0", "short=documents:1,blocks:3,seed:0,block:5"])
    assert str(wanted["short"]) == "documents:1,blocks:3,seed:0,block:5"
    cut = cut_windows(shard, wanted, 8, WIDER, documents, prefix=[50])
    assert cut["long"].tokens.shape == (2, 8) and cut["short"].tokens.shape == (3, 5)
    for window in cut.values():
        assert (window.tokens[:, 0] == 50).all()
        assert window.tokens[:, 1].tolist() == window.starts
        assert (np.diff(window.tokens[:, 1:], axis=1) == 1).all()
    assert not set(cut["long"].tokens[:, 1:].flat) & set(cut["short"].tokens[:, 1:].flat)


def test_special_tokens_need_drawn_windows_and_room(tmp_path):
    shard = tmp_path / "shard.bin"
    write_shard(shard, np.arange(40))
    with pytest.raises(ValueError, match="draw documents"):
        cut_windows(shard, {"a": Stretch(0, 8)}, 8, CONFIG.shape, prefix=[1])
    with pytest.raises(ValueError, match="expected 2 beside 7 special tokens"):
        cut_windows(shard, {"a": Draw(1, 1, 0)}, 8, CONFIG.shape, prefix=[1] * 7)
    with pytest.raises(ValueError, match="not all below the model's vocabulary"):
        cut_windows(shard, {"a": Draw(1, 1, 0)}, 8, CONFIG.shape, prefix=[10**6])


# --- Windows of domains ---


@pytest.fixture
def domains(tmp_path):
    """Eight texts of 20 tokens, each token its own position; those of two periods and one of none."""
    shard, documents = tmp_path / "shard.bin", tmp_path / "documents.json"
    write_shard(shard, np.arange(160) % 50)
    names = ["1800-a", "1810-b", "1820-c", "1900-a", "1910-b", "1920-c", "[odd]", "2000"]
    entries = [{"document": name, "start": 20 * index, "end": 20 * index + 20} for index, name in enumerate(names)]
    documents.write_text(json.dumps(entries))
    return shard, documents


def test_windows_are_drawn_from_the_documents_that_are_named_and_no_other(domains):
    shard, documents = domains
    wanted = ["old=documents:2,blocks:2,seed:0,of:18*", "new=documents:3,blocks:3,seed:0,of:190?-?|1910-b|1920-c"]
    windows = parse_windows([*wanted, "odd=documents:1,blocks:1,seed:3,block:4,of:[odd]"])
    assert [f"{name}={window}" for name, window in windows.items()][:2] == wanted
    cut = cut_windows(shard, windows, 8, CONFIG.shape, documents)
    assert {name[:2] for name in cut["old"].documents} == {"18"}
    assert sorted(cut["new"].documents) == ["1900-a", "1910-b", "1920-c"] and cut["odd"].documents == ["[odd]"]


@given(prefix=st.integers(0, 2), pieces=st.integers(1, 4), short=st.integers(4, 9), blocks=st.integers(1, 3))
def test_shorter_blocks_are_the_same_tokens_in_order_with_special_tokens_before_each(prefix, pieces, short, blocks):
    begin = list(range(100, 100 + prefix))
    own = pieces * short - prefix
    starts = [1000 * block for block in range(blocks)]
    tokens = np.array([[*begin, *range(start, start + own)] for start in starts])
    cut = cut_shorter({"a": Blocks(tokens, starts, [f"text-{start}" for start in starts])}, [short], begin)
    ((name, found),) = cut.items()
    assert name == f"a-{short}" and found.tokens.shape == (pieces * blocks, short)
    assert (found.tokens[:, :prefix] == begin).all()
    own = found.tokens[:, prefix:]
    assert own[:, 0].tolist() == found.starts and (np.diff(own, axis=1) == 1).all()
    assert len(set(own.flat)) == own.size and set(own.flat) <= set(tokens[:, prefix:].flat)
    assert found.documents == [f"text-{start // 1000 * 1000}" for start in found.starts]


def test_the_stage_cuts_the_same_tokens_into_blocks_of_each_length(domains, model, tmp_path):
    shard, documents = domains
    output = tmp_path / "w.safetensors"
    window = "validation-old=documents:3,blocks:3,seed:0,of:18*"
    result = run(shard, model, output, window, block=16, documents=documents, lengths=[4, 16])
    assert (result.exit_code, result.output) == (0, "")
    tensors, _ = read_tensors(output)
    assert {name: tuple(own.shape) for name, own in tensors.items()} == {
        "validation-old-4": (12, 4),
        "validation-old-16": (3, 16),
    }
    assert torch.equal(tensors["validation-old-4"].flatten(), tensors["validation-old-16"].flatten())
    assert len(set(window_documents(output, "validation-old-4"))) == 3
    assert len(output.with_suffix(".csv").read_text().splitlines()) == 1 + 12 + 3


@pytest.mark.parametrize(
    ("window", "lengths", "block", "said"),
    [
        (
            "documents:1,blocks:1,seed:0,of:17*",
            [8],
            8,
            "window a: no document is called 17*; there are 8, the first is",
        ),
        ("documents:4,blocks:4,seed:0,of:18*", [8], 8, "window a: 3 of 3 documents left are long enough for 1 blocks"),
        ("documents:1,blocks:3,seed:0,of:18*", [8], 8, "window a: 0 of 3 documents left are long enough for 3 blocks"),
        ("documents:1,blocks:1,seed:0", [16], 8, "window a: blocks of 8 tokens, expected 16 to cut"),
        ("documents:1,blocks:1,seed:0", [8, 32], 32, "domains.lengths: 32, expected at most the model's context of 16"),
    ],
)
def test_unknown_texts_short_texts_and_long_blocks_are_one_line(domains, model, tmp_path, window, lengths, block, said):
    shard, documents = domains
    result = run(shard, model, tmp_path / "w", f"a={window}", block=block, documents=documents, lengths=lengths)
    assert result.exit_code == 1 and result.output.count("\n") == 1 and said in result.output
    assert not (tmp_path / "w").exists() and not (tmp_path / "w.csv").exists()


def test_a_length_without_room_beside_special_tokens_names_the_key():
    with pytest.raises(ValueError, match=r"domains\.lengths: 4, expected 2 beside 3 special tokens"):
        check_lengths([8, 4], CONFIG.shape, [1, 2, 3])
