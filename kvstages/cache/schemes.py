"""Quantizer schemes as data: what is done to keys and to values before and while they are stored, and its bytes.

A *method* says what is done to one side, keys or values; a *scheme* is a method for each side; a *precision* is a
scheme and a number of bits. ``docs/schemes.md`` has each option's formula, source, use and harm.

A precision is written as its levels and bits, then its options, joined by "+" in a fixed order:

    int4                                    the published quantizer (docs/method.md, "Quantizer")
    int4-hadamard                           keys and values rotated
    lloyd4-k.mean+hadamard+mse+first1       "k." or "v." in front of an option: keys or values alone

Some have names of their own (``NAMED``), among them the formats of engines. Every precision has one spelling:
``precision(text).text == text``, and any other spelling is refused with the right one.

Axes: D head width, T tokens.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple

SIDES = ("k", "v")
# Bits that each kind of levels has.
INTEGER_BITS = (8, 6, 5, 4, 3, 2)
LEVELS = {
    "int": INTEGER_BITS,
    "rise": INTEGER_BITS,
    "lloyd": INTEGER_BITS,
    "fp": (8, 4),
    "q_0": (8, 5, 4),
    "q_1": (5, 4),
    "per_token_head": (8, 4),
}
# How levels and bits are written together.
_SPELLING = {"q_0": "q{}_0", "q_1": "q{}_1", "per_token_head": "int{}_per_token_head"}
_BASE = re.compile(r"(?:(int|rise|lloyd|fp)(\d)|q(\d)_([01])|int(\d)_(per_token_head))")
# The words of each option, in the order in which they are written.
_SIZE = r"(?:[2-9]|[1-9]\d+)"
_WORDS = {
    "offset": "mean|bias",
    "rotation": f"hadamard|hadamard{_SIZE}|randomized",
    "search": "mse",
    "stored": "fp32|e4m3",
    "share": f"group{_SIZE}|channel{_SIZE}|tensor",
    "zero": "zero",
    "first": r"first[1-9]\d*",
    "recent": r"recent[1-9]\d*",
}
# An engine's format has its own scales; these options may be added to it.
_ENGINES = {
    "q_0": ("offset", "rotation", "first", "recent"),
    "q_1": ("offset", "rotation", "first", "recent"),
    "per_token_head": ("offset", "first", "recent"),
}
SCALE_BYTES = {"fp16": 2, "fp32": 4, "e4m3": 1}
OFFSET_BYTES = 2
STATIC_BYTES = 4
EXACT_BYTES = 2

# Precisions with a name of their own; {} stands for the bits.
NAMED = {
    "rotated{}": "int{}-hadamard",
    "centred{}": "lloyd{}-k.mean+hadamard+mse+first1",
    "debiased{}": "lloyd{}-k.bias+hadamard+mse+first1",
    "kivi{}": "int{}-k.channel32+v.group32+zero",
    "fp8_e4m3": "fp8-tensor",
    "fp8_per_token_head": "fp8-fp32",
    "nvfp4": "fp4-e4m3+group16",
}


# What the text of a precision looks like; ``precision`` says whether it is one.
_OPTION = rf"(?:[kv]\.)?(?:{'|'.join(_WORDS.values())})"
PRECISION = "(?:{})".format(
    "|".join(
        (
            *(name.replace("{}", r"\d") for name in NAMED),
            rf"(?:(?:int|rise|lloyd|fp)\d|q\d_[01]|int\d_per_token_head)(?:-{_OPTION}(?:\+{_OPTION})*)?",
        )
    )
)


@dataclass(frozen=True)
class Method:
    """What is done to one side. The default is the published quantizer.

    ``levels``: int (mid-tread: 2^b − 1 levels with a zero; with a zero point 2^b levels), rise (mid-rise: 2^b levels),
    lloyd (Lloyd-Max levels of the unit Gaussian), fp (E4M3 or E2M1), or an engine's own integer format: q_0 and q_1
    (llama.cpp), per_token_head (vLLM).
    ``offset``: subtracted before and added back after, mean (of the calibration's keys) or bias (of the model's key
    projection); "" for none. ``rotation``: hadamard, hadamardN (blocks of N along D), randomized, or "".
    ``search``: mse (a multiplier of the scale is searched for the least squared error), or "".
    ``stored``: how a scale is stored. ``share``: what has one scale: token, groupN (N along D), channelN (a channel of
    N tokens; they stay exact until the group is full), tensor (static, from the calibration).
    ``zero``: a zero point. ``first``, ``recent``: that many first and last tokens stay exact.
    """

    levels: str = "int"
    offset: str = ""
    rotation: str = ""
    search: str = ""
    stored: str = "fp16"
    share: str = "token"
    zero: bool = False
    first: int = 0
    recent: int = 0

    @property
    def group(self) -> int:
        """Values along D that share a scale; 0 for all of them."""
        return _number(self.share, "group")

    @property
    def tokens(self) -> int:
        """Tokens that share a scale."""
        return max(1, _number(self.share, "channel"))

    @property
    def rotation_block(self) -> int:
        """Width of the blocks that are rotated; 0 for all of D."""
        return _number(self.rotation, "hadamard")

    @property
    def delayed(self) -> bool:
        """Whether a token is read exactly for some steps after its own, and stored only then."""
        return self.tokens > 1 or self.recent > 0

    @property
    def needs(self) -> tuple[str, ...]:
        """What must be known of the model before anything is stored: mean, bias, maximum."""
        static = self.share == "tensor" or self.stored == "e4m3"
        return (*((self.offset,) if self.offset else ()), *(("maximum",) if static else ()))

    def stored_tokens(self, seen: int) -> int:
        """How many tokens are stored quantized once ``seen`` are in the cache; the others are exact."""
        return self.tokens * max(0, (seen - self.first - self.recent) // self.tokens)

    def stored_at(self, token: int) -> int:
        """Tokens in the cache from which on ``token`` (from 0) is read quantized; it is exact before.

        The query of position t finds t tokens, so it reads ``token`` quantized where t >= stored_at. −1 for never.
        """
        if token < self.first:
            return -1
        group = (token - self.first) // self.tokens
        return self.first + self.tokens * (group + 1) + self.recent


PUBLISHED = Method()


@dataclass(frozen=True)
class Precision:
    """A scheme (a method for keys, one for values) and its bits."""

    keys: Method
    values: Method
    bits: int

    def method(self, side: str) -> Method:
        """What is done to keys (side k) or values (side v)."""
        return self.keys if side == "k" else self.values

    @property
    def text(self) -> str:
        """The one spelling of this precision."""
        compact = _compact(self)
        return _names().get(compact, compact)

    @property
    def needs_calibration(self) -> bool:
        """Whether a pass over text must tell what the scheme needs; biases are in the model's own weights."""
        return any(need != "bias" for side in SIDES for need in self.method(side).needs)

    @property
    def published(self) -> bool:
        """Whether this is the published quantizer."""
        return self.keys == self.values == PUBLISHED


class Bytes(NamedTuple):
    """Bytes of one head's keys, or of its values, in one cache."""

    payload: int  # codes, and exact tokens in 16 bits
    scales: int  # scales and zero points
    once: int  # what is stored once a cache however long it grows: offsets, static scales


def precision(text: str) -> Precision:
    """The precision that ``text`` spells; ValueError says in a line what is wrong with it."""
    if not isinstance(text, str):
        raise ValueError(f"precision {text!r}: expected text such as int4")
    return _read(text)


@cache
def _read(text: str) -> Precision:
    try:
        found = _parse(_expanded().get(text, text))
    except ValueError as error:
        raise ValueError(f"precision {text!r}: {error}") from None
    if found.text != text:
        raise ValueError(f"precision {text!r}: its one spelling is {found.text!r}")
    return found


def stored_bytes(name: Precision, side: str, head_dim: int, tokens: int) -> Bytes:
    """Bytes of one head's keys (k) or values (v) in a cache of ``tokens`` tokens, as the next step finds it."""
    method = name.method(side)
    quantized = method.stored_tokens(tokens)
    per_token, per_group = 0, 0
    scale = SCALE_BYTES[method.stored] * (2 if method.zero else 1)
    if method.tokens > 1:
        per_group = head_dim * scale
    elif method.share != "tensor":
        per_token = scale * (head_dim // method.group if method.group else 1)
    return Bytes(
        quantized * math.ceil(head_dim * name.bits / 8) + (tokens - quantized) * head_dim * EXACT_BYTES,
        quantized * per_token + quantized // method.tokens * per_group,
        sum(STATIC_BYTES if need == "maximum" else OFFSET_BYTES * head_dim for need in method.needs),
    )


def bits_per_element(name: Precision, side: str, head_dim: int, tokens: int) -> tuple[float, float]:
    """Bits a stored element takes: the mean over the decoding steps 1 to ``tokens``, and at their end.

    The mean is that over all elements that the steps find stored: the sum of a cache's bits after each step, over the
    sum of its elements. Scales, zero points and exact tokens count; what is stored once a cache does not.
    """

    def size(seen: int) -> int:
        found = stored_bytes(name, side, head_dim, seen)
        return 8 * (found.payload + found.scales)

    elements = head_dim * tokens
    return sum(map(size, range(1, tokens + 1))) / (elements * (tokens + 1) / 2), size(tokens) / elements


def check_width(name: Precision, side: str, head_dim: int) -> None:
    """ValueError in a line where heads of this width cannot be stored so."""
    method = name.method(side)
    for what, block in (("groups", method.group), ("rotated blocks", method.rotation_block)):
        if block and head_dim % block:
            raise ValueError(f"heads of width {head_dim} have no whole {what} of {block}")
    if method.rotation == "randomized" and head_dim & (head_dim - 1):
        raise ValueError(f"heads of width {head_dim}, but the randomized Hadamard matrix has a power of two")


def _number(word: str, kind: str) -> int:
    """N of a word kindN; 0 for any other word."""
    return int(word[len(kind) :] or 0) if word.startswith(kind) else 0


def _implied(levels: str, bits: int) -> Method:
    """What levels imply without being told: an engine's format is more than its levels."""
    if levels in ("q_0", "q_1"):
        return Method(levels, share="group32", zero=levels == "q_1")
    if levels == "per_token_head":
        return Method(levels, stored="fp32", rotation="randomized" if bits == 4 else "")
    return Method(levels)


def _word(method: Method, option: str, implied: Method) -> str:
    """How an option is written; "" where it need not be."""
    value = getattr(method, option)
    if value == getattr(implied, option):
        return ""
    return option if value is True else f"{option}{value}" if isinstance(value, int) else value


def _compact(name: Precision) -> str:
    levels = name.keys.levels
    implied = _implied(levels, name.bits)
    words = []
    for option in _WORDS:
        keys, values = (_word(name.method(side), option, implied) for side in SIDES)
        if keys == values:
            words.append(keys)
        else:
            words += [f"{side}.{word}" for side, word in (("k", keys), ("v", values)) if word]
    base = _SPELLING.get(levels, levels + "{}").format(name.bits)
    return "-".join([base, *filter(None, ["+".join(filter(None, words))])])


def _parse(text: str) -> Precision:
    base, dash, options = text.partition("-")
    found = _BASE.fullmatch(base)
    if not found:
        raise ValueError(f"{base!r} is no kind of levels with bits, such as int4, rise4, lloyd4, fp8 or q4_0")
    plain, plain_bits, q_bits, q_kind, engine_bits, engine = found.groups()
    levels = plain or (f"q_{q_kind}" if q_kind else engine)
    bits = int(plain_bits or q_bits or engine_bits)
    if bits not in LEVELS[levels]:
        raise ValueError(f"{base!r} has {bits} bits; expected {', '.join(map(str, LEVELS[levels]))}")
    methods = dict.fromkeys(SIDES, _implied(levels, bits))
    set_by: dict[tuple[str, str], str] = {}
    for word in options.split("+") if dash else ():
        side, dot, bare = word.rpartition(".")
        if dot and side not in SIDES:
            raise ValueError(f"option {word!r}: expected k. or v. in front, or nothing")
        option = next((option for option, words in _WORDS.items() if re.fullmatch(words, bare)), None)
        if option is None:
            raise ValueError(f"unknown option {bare!r}")
        if option not in _ENGINES.get(levels, _WORDS):
            raise ValueError(f"option {bare!r}: {base!r} is an engine's format, with scales of its own")
        for each in side or SIDES:
            if (each, option) in set_by:
                raise ValueError(f"options {set_by[each, option]!r} and {word!r} exclude each other")
            set_by[each, option] = word
            methods[each] = replace(methods[each], **{option: _value(option, bare)})
    for method in methods.values():
        _check(method)
    return Precision(methods["k"], methods["v"], bits)


def _value(option: str, word: str) -> str | int | bool:
    kind = {field.name: field.type for field in fields(Method)}[option]
    return {"bool": lambda: True, "int": lambda: int(word[len(option) :]), "str": lambda: word}[kind]()


def _check(method: Method) -> None:
    """ValueError where options do not go together."""
    if method.levels in _ENGINES:
        return
    if method.zero and (method.levels != "int" or method.stored == "e4m3" or method.share == "tensor"):
        raise ValueError("a zero point goes with int levels and FP16 or FP32 scales of a token, group or channel")
    if method.share == "tensor" and (method.search or method.stored != "fp16" or method.levels == "lloyd"):
        raise ValueError("a static scale of the tensor goes with int, rise or fp levels and no other option of scales")


@cache
def _expanded() -> dict[str, str]:
    """Compact text of every named precision."""
    found = {}
    for name, text in NAMED.items():
        for bits in INTEGER_BITS if "{}" in name else (0,):
            found[name.format(bits)] = text.format(bits)
    return found


@cache
def _names() -> dict[str, str]:
    return {text: name for name, text in _expanded().items()}
