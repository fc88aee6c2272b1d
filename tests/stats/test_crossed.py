"""Intervals over seeds and documents: coverage against a simulated effect, and Student's t."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t as student

from kvstages.stats.crossed import crossed_mean, t_quantile


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("freedom", [1.0, 2.0, 3.7, 15.0, 400.0])
def test_coarse_students_t(freedom):
    assert t_quantile(0.975, freedom) == pytest.approx(student.ppf(0.975, freedom), rel=1e-3)


@pytest.mark.parametrize("freedom", [1.0, 2.0, 3.7, 15.0, 400.0])
def test_students_t(freedom):
    assert t_quantile(0.975, freedom) == pytest.approx(student.ppf(0.975, freedom), rel=1e-3)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(
    ("seeds", "of_seeds", "of_documents", "of_blocks"),
    [
        *((1, 0.0, *parts) for parts in [(0.0, 1.0), (1.0, 1.0), (1.0, 0.1)]),
        *(
            (seeds, *parts)
            for seeds in (3, 5)
            for parts in [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1.0, 1.0, 1.0), (0.3, 1.0, 0.1), (0.0, 0.0, 1.0)]
        ),
    ],
)
def test_the_interval_holds_a_simulated_effect_as_often_as_it_says(seeds, of_seeds, of_documents, of_blocks):
    """16 documents of two blocks, an effect of 0.7, seeds and documents drawn anew in each of 1,000 trials."""
    random, held, trials = np.random.default_rng(seeds), 0, 1000
    labels = [f"text-{block // 2}" for block in range(32)]
    for _ in range(trials):
        values = 0.7 + of_seeds * random.normal(size=(seeds, 1)) + of_blocks * random.normal(size=(seeds, 32))
        values += np.repeat(of_documents * random.normal(size=16), 2)
        _, low, high = crossed_mean(values, labels)
        held += low <= 0.7 <= high
    # 95 % less three standard errors; the interaction counts twice, so a mean of noise alone is held more often.
    assert held / trials >= 0.93


@pytest.mark.usefixtures("coarse")
def test_it_is_no_wider_than_it_must_where_documents_alone_vary():
    random = np.random.default_rng(0)
    held = sum(low <= 0 <= high for _, low, high in (crossed_mean(random.normal(size=(1, 20))) for _ in range(2000)))
    assert held / 2000 == pytest.approx(0.95, abs=0.02)


def test_by_hand():
    """Two documents with means 1 and 3: mean 2, standard error 1, one degree of freedom."""
    estimate = crossed_mean(np.array([[0.0, 2.0, 3.0, 3.0]]), ["a", "a", "b", "b"])
    assert estimate.value == 2.0 and estimate.high - 2.0 == pytest.approx(12.706, rel=1e-3)


def test_equal_values_have_no_width_and_nothing_to_vary_is_an_error():
    assert crossed_mean(np.full((3, 4), 0.5)) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="one seed and one document"):
        crossed_mean(np.ones((1, 2)), ["a", "a"])
    with pytest.raises(ValueError, match="labels of 1 blocks, expected those of 2"):
        crossed_mean(np.ones((1, 2)), ["a"])
