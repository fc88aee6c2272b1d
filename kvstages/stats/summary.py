"""The figures of one policy on one window, from the metrics of its positions: what evaluation.json holds.

As complete as ``perplexity --kl-divergence`` of llama.cpp, in nats and probabilities. Its standard errors take tokens
as independent; these are over blocks.
"""

from __future__ import annotations

import math

import numpy as np

from kvstages.stats.bootstrap import block_means, percentile_interval, resampled_means, standard_error
from kvstages.stats.correlation import correlation

# By the names that their keys begin with, from the largest; max comes before and min after them.
PERCENTILES = {
    "p99_9": 99.9, "p99": 99.0, "p95": 95.0, "p90": 90.0, "p50": 50.0, "p10": 10.0, "p5": 5.0, "p1": 1.0, "p0_1": 0.1,
}  # fmt: skip
SPREAD = ("max", *PERCENTILES, "min")
# Metrics of the token that follows, which the last position of a block has not.
NEXT_TOKEN = ("cross_entropy", "reference_cross_entropy", "delta_p")
# Of a perplexity, in nats.
LARGEST_EXPONENT = 700


def summarise(metrics: dict[str, np.ndarray]) -> dict[str, float | int | None]:
    """The figures of one policy on one window, from its position metrics [B, T] (``metrics.position_metrics``).

    NAME_error is a standard error over blocks (None where there is only one), NAME_low and NAME_high the ends of the
    95 % bootstrap interval over blocks, the same draws for all. Errors of perplexities and of the root mean square are
    those of the means in them, by the delta method. ValueError where a metric is no finite number or FP64 cannot hold a
    perplexity.
    """
    _check_finite(metrics)
    own, reference, delta = (metrics[name] for name in NEXT_TOKEN)
    agrees = metrics["agrees"].astype(bool)
    averaged = {
        "mean_kl": metrics["kl"], "mean_reverse_kl": metrics["reverse_kl"], "agreement": agrees, "cross_entropy": own,
        "reference_cross_entropy": reference, "log_perplexity_ratio": own - reference, "mean_delta_p": delta,
        "square": delta**2,
    }  # fmt: skip
    drawn = dict(zip(averaged, resampled_means(*averaged.values()), strict=True))

    def average(name: str) -> dict[str, float]:
        return _figure(name, block_means(averaged[name]).mean(), standard_error(averaged[name]), drawn[name])

    def exponential(name: str, mean: str) -> dict[str, float]:
        if drawn[mean].max() > LARGEST_EXPONENT:
            raise ValueError(f"{mean}: {drawn[mean].max():.4g} nats, a perplexity that FP64 cannot hold")
        value = math.exp(block_means(averaged[mean]).mean())
        return _figure(name, value, value * standard_error(averaged[mean]), np.exp(drawn[mean]))

    perplexity, other = exponential("perplexity", "cross_entropy"), exponential("reference_perplexity", NEXT_TOKEN[1])
    difference = perplexity["perplexity"] * block_means(own) - other["reference_perplexity"] * block_means(reference)
    root = math.sqrt(block_means(averaged["square"]).mean())
    disagreeing = ~agrees.all(axis=1)
    known = ~np.isnan(own)
    figures = {
        "sequences": agrees.shape[0],
        "positions": agrees.size,
        "targets": int(known.sum()),
        **average("mean_kl"),
        **_spread("kl", metrics["kl"]),
        **average("mean_reverse_kl"),
        **_spread("reverse_kl", metrics["reverse_kl"]),
        **average("agreement"),
        **average("cross_entropy"),
        **average("reference_cross_entropy"),
        "cross_entropy_correlation": correlation(own[known], reference[known]),
        **perplexity,
        **other,
        **average("log_perplexity_ratio"),
        **exponential("perplexity_ratio", "log_perplexity_ratio"),
        **_figure(
            "perplexity_difference",
            perplexity["perplexity"] - other["reference_perplexity"],
            standard_error(difference),
            np.exp(drawn["cross_entropy"]) - np.exp(drawn["reference_cross_entropy"]),
        ),
        **average("mean_delta_p"),
        **_figure(
            "rms_delta_p",
            root,
            standard_error(averaged["square"]) / (2 * root) if root > 0 else 0.0,
            np.sqrt(drawn["square"]),
        ),
        **_spread("delta_p", delta),
        "max_logit_deviation": float(metrics["logit_deviation"].max()),
        "first_disagreement_mean": float((~agrees[disagreeing]).argmax(axis=1).mean()) if disagreeing.any() else None,
        "sequences_with_disagreement": int(disagreeing.sum()),
    }
    return {name: None if value is None or math.isnan(value) else value for name, value in figures.items()}


def _check_finite(metrics: dict[str, np.ndarray]) -> None:
    for name, values in metrics.items():
        expected = values[:, :-1] if name in NEXT_TOKEN else values
        wrong = np.argwhere(~np.isfinite(expected))
        if len(wrong):
            block, position = (int(index) for index in wrong[0])
            raise ValueError(
                f"{name} is {expected[block, position]} in block {block}, position {position}, "
                "expected a finite number: does the model give finite logits?"
            )


def _figure(name: str, value: float, error: float, drawn: np.ndarray) -> dict[str, float]:
    """A figure, its standard error, and the interval of its values over resampled blocks [RESAMPLES]."""
    low, high = percentile_interval(drawn)
    return {name: float(value), f"{name}_error": error, f"{name}_low": low, f"{name}_high": high}


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Largest, smallest and percentiles over all positions that have a value."""
    quantiles = np.nanquantile(values, [1.0, *(percent / 100 for percent in PERCENTILES.values()), 0.0])
    return {f"{place}_{name}": float(value) for place, value in zip(SPREAD, quantiles, strict=True)}
