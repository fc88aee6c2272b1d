import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstages.study.text import END_OF_WORD, Tokenizer, train_tokenizer

ALPHABET = "abc"
TRAINED = train_tokenizer(["aab abc aab cab bca aab abab abcabc", "cc aaa aaaa ca"], 20, ALPHABET)
texts = st.lists(st.text(ALPHABET, max_size=12), min_size=1, max_size=6).map(" ".join)
symbols = st.sampled_from(["a", "b", "c", "ab", "bc", "aa", "aab", "ca", END_OF_WORD])
merge_lists = st.lists(st.tuples(symbols, symbols), max_size=12)


def every_merge_in_order(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """The definition, to the letter: each merge once over the whole word, left to right, in order of training."""
    tokens = [*word, END_OF_WORD]
    for left, right in merges:
        merged: list[str] = []
        while tokens:
            if tokens[:2] == [left, right]:
                merged.append(left + right)
                tokens = tokens[2:]
            else:
                merged.append(tokens[0])
                tokens = tokens[1:]
        tokens = merged
    return tokens


@given(texts)
@settings(max_examples=100, deadline=None)
def test_decode_undoes_encode(text):
    assert TRAINED.decode(TRAINED.encode(text)) == text + " "


@given(st.text(ALPHABET, max_size=16), merge_lists)
@settings(max_examples=300, deadline=None)
def test_split_equals_every_merge_in_order(word, merges):
    assert Tokenizer({}, merges).split_word(word) == every_merge_in_order(word, merges)


def test_an_earlier_merge_is_not_tried_again():
    # (ab, c) comes first and finds nothing; (a, b) then makes ab, but its turn is over.
    assert Tokenizer({}, [("ab", "c"), ("a", "b")]).split_word("abc") == ["ab", "c", END_OF_WORD]


def test_a_repeated_merge_gets_each_of_its_turns():
    merges = [("a", "b"), ("b", "c"), ("a", "b")]
    assert Tokenizer({}, merges).split_word("abbc") == every_merge_in_order("abbc", merges)
    merges = [("ab", "c"), ("a", "b"), ("ab", "c")]
    assert Tokenizer({}, merges).split_word("abc") == ["abc", END_OF_WORD]


def test_training_is_what_the_merges_say():
    assert len(TRAINED.vocabulary) == 20
    for word in ("aab", "abcabc", "cc", ""):
        assert TRAINED.split_word(word) == every_merge_in_order(word, TRAINED.merges)


def test_unknown_token_names_token_and_word():
    with pytest.raises(ValueError, match="token 'x' of the word 'axb' is not in the vocabulary"):
        TRAINED.encode("aab axb")


def test_unknown_id():
    with pytest.raises(ValueError, match="token id 99 is not in the vocabulary of 20 tokens"):
        TRAINED.decode([0, 99])


def test_vocabulary_smaller_than_its_alphabet():
    with pytest.raises(ValueError, match="vocabulary of 3 is smaller than its alphabet of 4"):
        train_tokenizer(["abc"], 3, ALPHABET)


def test_load_reads_the_published_formats(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps(TRAINED.vocabulary), encoding="utf-8")
    (tmp_path / "merges.json").write_text(json.dumps(TRAINED.merges), encoding="utf-8")
    loaded = Tokenizer.load(tmp_path / "vocab.json", tmp_path / "merges.json")
    assert loaded.encode("aab abc") == TRAINED.encode("aab abc")


@pytest.mark.parametrize(
    ("vocabulary", "merges", "expected"),
    [
        ("[1]", "[]", "vocab.json: expected a mapping of tokens to ids"),
        ('{"a": "x"}', "[]", "vocab.json: expected a mapping of tokens to ids"),
        ('{"a": 0, "b": 0}', "[]", "vocab.json: two tokens share the id 0"),
        ("{}", '[["a"]]', "merges.json: expected a list of pairs of tokens"),
        ("{}", "{", "merges.json: not a JSON file"),
    ],
)
def test_load_refuses_other_files(tmp_path, vocabulary, merges, expected):
    (tmp_path / "vocab.json").write_text(vocabulary, encoding="utf-8")
    (tmp_path / "merges.json").write_text(merges, encoding="utf-8")
    with pytest.raises(ValueError, match=expected):
        Tokenizer.load(tmp_path / "vocab.json", tmp_path / "merges.json")
