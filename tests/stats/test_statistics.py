"""Intervals against distributions whose mean is known, tests and correlations against plain counting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstages.stats.bootstrap import (
    block_interval,
    block_means,
    document_count,
    document_interval,
    document_members,
    mcnemar,
    medians,
    paired_difference,
    ratio_of_means,
    relative_reduction,
    resampled_means,
    standard_error,
)
from kvstages.stats.correlation import correlation, rank_correlation

TRIALS = 200


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=9))
def test_medians_are_those_of_each_list(values):
    lists = np.array([values, values[::-1], sorted(values)])
    assert medians(lists).tolist() == [float(np.median(values))] * 3


@pytest.fixture
def few_resamples(monkeypatch):
    monkeypatch.setattr("kvstages.stats.bootstrap.RESAMPLES", 500)


def coverage(interval, truth) -> float:
    """Share of seeded trials whose interval holds the truth. Of 200 trials at 94 % it strays by 1.7 % (one sigma)."""
    rng = np.random.default_rng(3)
    intervals = [interval(rng) for _ in range(TRIALS)]
    return sum(low <= truth <= high for low, high in intervals) / TRIALS


def blocks(rng, count=32, length=8, shared=1.0):
    """Positions [B, T] with mean 1 that share most of their variation within a block."""
    return 1.0 + shared * rng.normal(size=(count, 1)) + 0.1 * rng.normal(size=(count, length))


def test_the_interval_covers_the_mean_as_often_as_it_says(few_resamples):
    assert 0.9 <= coverage(lambda rng: block_interval(blocks(rng)), 1.0) <= 0.98


def test_the_interval_of_skewed_blocks_covers_nearly_as_often(few_resamples):
    """KL is skewed: percentile intervals of 32 exponential blocks hold a little less than they say."""
    assert 0.88 <= coverage(lambda rng: block_interval(rng.exponential(size=32)), 1.0) <= 0.97


def test_positions_taken_as_independent_would_cover_far_too_rarely(few_resamples):
    assert coverage(lambda rng: block_interval(blocks(rng).reshape(-1, 1)), 1.0) < 0.65


def clustered(rng, documents=16, blocks_each=2, between=0.5):
    """Blocks with mean 1 of documents that differ in their level, and the document of each block."""
    levels = 1.0 + between * rng.normal(size=documents)
    values = np.repeat(levels, blocks_each) + 0.1 * rng.normal(size=documents * blocks_each)
    return values, [f"text-{index}" for index in range(documents) for _ in range(blocks_each)]


def test_documents_drawn_whole_cover_other_documents_and_single_blocks_do_not(few_resamples):
    """Eight blocks a document that hardly differ within it: 128 blocks, but 16 texts."""
    few = lambda rng: clustered(rng, 16, 8)  # noqa: E731 - two uses, one line
    assert 0.87 <= coverage(lambda rng: document_interval(*few(rng)), 1.0) <= 0.98
    assert coverage(lambda rng: block_interval(few(rng)[0]), 1.0) < 0.65


def test_more_documents_cover_better_and_paired_figures_cover_by_document_too(few_resamples):
    assert 0.88 <= coverage(lambda rng: document_interval(*clustered(rng, 32)), 1.0) <= 0.98

    def pair(rng):
        second, documents = clustered(rng, 32)
        second = 5 + second
        shift = np.repeat(0.1 * rng.normal(size=32), 2)
        return 0.8 * second + shift, second, documents

    def by_document(statistic):
        def interval(rng):
            first, second, documents = pair(rng)
            return statistic(first, second, documents=documents)[1:]

        return interval

    assert 0.88 <= coverage(by_document(paired_difference), -1.2) <= 0.98
    assert 0.88 <= coverage(by_document(ratio_of_means), 0.8) <= 0.98
    assert 0.88 <= coverage(by_document(relative_reduction), 0.2) <= 0.98


def test_a_block_a_document_is_the_bootstrap_over_blocks():
    values = np.random.default_rng(5).normal(size=(12, 3))
    each = [f"{index:02d}" for index in range(12)]
    assert document_interval(values, each) == pytest.approx(block_interval(values))


def test_documents_count_by_the_blocks_that_they_hold():
    """Of 3 blocks at 0 and 1 at 4 the mean is 1; a draw of one document twice is its own mean."""
    values, documents = np.array([0.0, 4.0, 0.0, 0.0]), ["long", "short", "long", "long"]
    assert document_members(documents).tolist() == [[1, 0, 1, 1], [0, 1, 0, 0]]
    (drawn,) = resampled_means(values, documents=documents)
    assert set(drawn.tolist()) == {0.0, 1.0, 4.0}
    assert document_count(documents) == 2 and document_count(None) == 0


@pytest.mark.parametrize("documents", [None, ["a", "b", "c", "c"]])
def test_unknown_or_too_few_documents_have_no_interval(documents):
    assert document_interval(np.arange(4.0), documents) == (None, None)


def test_labels_must_be_of_the_same_blocks():
    with pytest.raises(ValueError, match="samples of 3 and 4 blocks, expected the same blocks in each"):
        resampled_means(np.ones(3), documents=["a", "b", "c", "d"])


def test_differences_and_ratios_cover(few_resamples):
    def pair(rng):
        second = 5 + rng.normal(size=(32, 1)) + 0.2 * rng.normal(size=(32, 8))
        return 0.8 * second + 0.2 * rng.normal(size=(32, 1)), second

    assert 0.9 <= coverage(lambda rng: paired_difference(*pair(rng))[1:], -1.0) <= 0.98
    assert 0.9 <= coverage(lambda rng: ratio_of_means(*pair(rng))[1:], 0.8) <= 0.98
    assert 0.9 <= coverage(lambda rng: relative_reduction(*pair(rng))[1:], 0.2) <= 0.98


def test_paired_is_narrower_than_unpaired_where_blocks_are_alike(few_resamples):
    rng = np.random.default_rng(1)
    first = 1.0 + rng.normal(size=(32, 1)) + 0.1 * rng.normal(size=(32, 8))
    second = first - 0.3 + 0.1 * rng.normal(size=first.shape)
    paired = paired_difference(first, second)
    shuffled = paired_difference(first, second[rng.permutation(32)])
    assert paired.value == pytest.approx(first.mean() - second.mean()) == pytest.approx(shuffled.value)
    assert paired.low > 0.2 and paired.high - paired.low < (shuffled.high - shuffled.low) / 5
    low, high = np.quantile(np.subtract(*resampled_means(first, second)), [0.025, 0.975])
    assert (paired.low, paired.high) == pytest.approx((low, high))


def test_the_same_seed_gives_the_same_interval_and_equal_blocks_no_width():
    values = np.random.default_rng(4).normal(size=(9, 4))
    assert block_interval(values) == block_interval(values) != block_interval(values, seed=1)
    assert block_interval(np.full((5, 3), 0.25)) == (0.25, 0.25)
    assert ratio_of_means(3 * np.abs(values), np.abs(values)) == pytest.approx((3, 3, 3))


def test_positions_without_a_value_do_not_count():
    values = np.array([[1.0, 3.0, np.nan], [5.0, 7.0, np.nan]])
    assert block_means(values).tolist() == [2, 6]
    assert standard_error(values) == pytest.approx(math.sqrt(8) / math.sqrt(2))
    assert math.isnan(standard_error(values[:1]))
    with pytest.raises(ValueError, match="2 blocks, 1 of them without a value"):
        block_means(np.array([[1.0], [np.nan]]))
    with pytest.raises(ValueError, match="no blocks, expected one at least"):
        block_means(np.empty((0, 3)))


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match="samples of 3 and 4 blocks, expected the same blocks in each"):
        paired_difference(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="samples of 3 and 4 blocks"):
        ratio_of_means(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match=r"a ratio to a mean that may be 0\.0, expected one above 0 in every resample"):
        ratio_of_means(np.ones(2), np.array([1.0, 0.0]))


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (1, 0), (5, 5), (9, 2), (2, 9), (0, 12), (7, 6)])
def test_mcnemar_counts_the_throws_of_a_fair_coin(only_first, only_second):
    first = np.array([True] * only_first + [False] * only_second + [True, True, False])
    second = np.array([False] * only_first + [True] * only_second + [True, True, False])
    coins = only_first + only_second
    throws = [sum(throw) for throw in itertools.product((0, 1), repeat=coins)]
    gap = abs(only_first - only_second)
    assert mcnemar(first, second) == pytest.approx(np.mean([abs(2 * heads - coins) >= gap for heads in throws]))


def test_mcnemar_of_many_positions():
    """Known values of the exact binomial test, two-sided: 86 of 236 and 1 of 40 (and what FP64 has no number for)."""
    first, second = np.zeros(236, dtype=bool), np.zeros(236, dtype=bool)
    first[:86] = second[86:] = True
    assert mcnemar(first.reshape(4, 59), second.reshape(4, 59)) == pytest.approx(3.715936139571442e-05, rel=1e-14)
    assert mcnemar(np.arange(40) > 0, np.arange(40) == 0) == pytest.approx(2 * 41 / 2**40, rel=1e-15)
    assert mcnemar(np.ones(2000), np.zeros(2000)) == 0
    with pytest.raises(ValueError, match=r"paired outcomes of shapes \(3,\) and \(4,\)"):
        mcnemar(np.ones(3), np.ones(4))


def test_rank_correlation_with_ties():
    """With ties at their mean rank, by hand: ranks 1 2.5 2.5 4 and 2 1 3.5 3.5."""
    assert rank_correlation([1, 2, 2, 9], [0.2, 0.1, 5, 5]) == pytest.approx(0.5)
    assert rank_correlation([1, 2, 3], [10, 100, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Without ties 1 - 6 Σ d² / (n (n² - 1)); the textbook's IQ and hours of television.
    iq = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert rank_correlation(iq, hours) == pytest.approx(-29 / 165)
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))
    with pytest.raises(ValueError, match="expected lists of one length above 1"):
        rank_correlation([1], [2])
    with pytest.raises(ValueError, match="expected lists of one length above 1"):
        rank_correlation([1, 2], [2, 3, 4])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_rank_correlation_is_pearsons_of_ranks_counted_plainly(pairs):
    def rank(values):
        return np.array([sum(x < y for x in values) + (sum(x == y for x in values) + 1) / 2 for y in values])

    first, second = zip(*pairs, strict=True)
    expected = correlation(rank(first), rank(second))
    assert rank_correlation(first, second) == pytest.approx(expected, nan_ok=True)
