"""The study's word-level byte-pair tokenizer: merges.json, vocab.json, and how they are trained.

docs/method.md, "Tokenizer": words are split at single spaces and each ends in ``<|EOW|>``; merges are applied
to a word's symbols one after the other in order of training; decoding writes a space for ``<|EOW|>``.
Byte-pair encoding: Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units",
ACL 2016.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from kvstages.files.read import read_json

END_OF_WORD = "<|EOW|>"
Pair = tuple[str, str]


def merge_pair(symbols: list[str], pair: Pair) -> list[str]:
    """Replace every occurrence of ``pair`` in ``symbols``, left to right, by the two joined."""
    merged, index = [], 0
    while index < len(symbols):
        if index + 1 < len(symbols) and symbols[index] == pair[0] and symbols[index + 1] == pair[1]:
            merged.append(pair[0] + pair[1])
            index += 2
        else:
            merged.append(symbols[index])
            index += 1
    return merged


class Tokenizer:
    """Encode text to token ids and back."""

    def __init__(self, vocabulary: dict[str, int], merges: Iterable[Pair]):
        self.vocabulary = dict(vocabulary)
        self.merges = [(left, right) for left, right in merges]
        # A pair may stand in the list more than once: a later merge can make its left half anew.
        self._ranks: defaultdict[Pair, list[int]] = defaultdict(list)
        for rank, pair in enumerate(self.merges):
            self._ranks[pair].append(rank)
        self._token = {index: token for token, index in self.vocabulary.items()}
        self._words: dict[str, list[int]] = {}

    @classmethod
    def load(cls, vocabulary: Path, merges: Path) -> Tokenizer:
        """Read vocab.json (token to id) and merges.json (list of pairs); ValueError names a file that is not that."""
        ids, pairs = read_json(vocabulary), read_json(merges)
        if not isinstance(ids, dict) or not all(type(index) is int for index in ids.values()):
            raise ValueError(f"{vocabulary}: expected a mapping of tokens to ids")
        repeated = [index for index, count in Counter(ids.values()).items() if count > 1]
        if repeated:
            raise ValueError(f"{vocabulary}: two tokens share the id {repeated[0]}")
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(half, str) for half in pair) for pair in pairs
        ):
            raise ValueError(f"{merges}: expected a list of pairs of tokens")
        return cls(ids, [(left, right) for left, right in pairs])

    def split_word(self, word: str) -> list[str]:
        """The tokens of one word.

        Merges run in order of training, each once over the whole word. Jumping to the next merge that applies,
        never back to an earlier one, gives the same tokens without walking the list.
        """
        symbols, last = [*word, END_OF_WORD], -1
        while True:
            ranks = (rank for pair in pairwise(symbols) for rank in self._ranks.get(pair, ()))
            rank = min((rank for rank in ranks if rank > last), default=None)
            if rank is None:
                return symbols
            symbols, last = merge_pair(symbols, self.merges[rank]), rank

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; ValueError names a token that the vocabulary lacks."""
        ids: list[int] = []
        for word in text.split(" "):
            if word not in self._words:
                tokens = self.split_word(word)
                unknown = [token for token in tokens if token not in self.vocabulary]
                if unknown:
                    raise ValueError(f"token {unknown[0]!r} of the word {word!r} is not in the vocabulary")
                self._words[word] = [self.vocabulary[token] for token in tokens]
            ids.extend(self._words[word])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; ValueError names an id that the vocabulary lacks."""
        tokens = []
        for index in ids:
            if int(index) not in self._token:
                raise ValueError(f"token id {int(index)} is not in the vocabulary of {len(self._token)} tokens")
            tokens.append(self._token[int(index)])
        return "".join(tokens).replace(END_OF_WORD, " ")


def train_tokenizer(texts: Iterable[str], vocab_size: int, alphabet: Iterable[str]) -> Tokenizer:
    """Learn merges on ``texts`` until alphabet, end-of-word mark and merges make ``vocab_size`` tokens.

    The most frequent pair is merged first; equal counts go to the pair that sorts first, so the result depends on
    the texts alone.
    """
    base = [END_OF_WORD, *sorted(set(alphabet))]
    if vocab_size < len(base):
        raise ValueError(f"vocabulary of {vocab_size} is smaller than its alphabet of {len(base)}")
    counts = Counter(word for text in texts for word in text.split(" "))
    words = [[*word, END_OF_WORD] for word in counts]
    weights = list(counts.values())
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, symbols in enumerate(words):
        for pair in pairwise(symbols):
            pairs[pair] += weights[index]
            where[pair].add(index)

    tokens, merges = list(base), []
    known = set(base)
    while len(tokens) < vocab_size and pairs:
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        if best[0] + best[1] not in known:
            known.add(best[0] + best[1])
            tokens.append(best[0] + best[1])
        for index in sorted(where[best]):
            for pair in pairwise(words[index]):
                pairs[pair] -= weights[index]
                where[pair].discard(index)
                if not pairs[pair]:
                    del pairs[pair]
            words[index] = merge_pair(words[index], best)
            for pair in pairwise(words[index]):
                pairs[pair] += weights[index]
                where[pair].add(index)
    return Tokenizer({token: index for index, token in enumerate(tokens)}, merges)
