"""How do we know?

A picture looks right. How often, and how sure can we be?

Letters: n pictures (m of a second set), p the share of right ones among all pictures there could be, f features of
a picture.

Sources: the interval: Wilson 1927. Bootstrap: Efron 1979. Sign test for pairs: McNemar 1947. Counts corrected by a
second, better look: Tenenbein 1970; for a test with known error rates: Rogan and Gladen 1978; prediction-powered
inference: Angelopoulos et al. 2023, arXiv 2301.09633. Adding up intervals: Newcombe 1998, Zou and Donner 2008.
Fréchet distance of pictures: Heusel et al. 2017, arXiv 1706.08500; its floor: Chong and Forsyth 2019, arXiv
1911.07023.

Promoted from notebooks/13_how_do_we_know.ipynb: edit there, then run `make promote`. (seal f5ea05b7)
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

__all__ = ["wilson_interval", "bootstrap_error", "mean_and_error", "paired_difference", "sign_test", "frechet_distance"]


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Where the true share lies if `right` of `count` independent pictures are right: 95 % of such intervals hold it.

    Its ends are the p whose own 1.96 standard errors just reach right / count. Wilson 1927.
    """
    z = 1.96
    middle = (right + z**2 / 2) / (count + z**2)
    half = z * math.sqrt(right * (count - right) / count + z**2 / 4) / (count + z**2)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap_error(statistic: Callable[[Sequence[Any]], float], cases: Sequence[Any], draws: int = 300) -> float:
    """Standard error of a statistic of independent cases: they are drawn again, with replacement. Efron 1979."""
    rng = random.Random(0)
    return statistics.stdev(statistic(rng.choices(cases, k=len(cases))) for _ in range(draws))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean of independent values, and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Mean of second − first over the same cases, and its standard error."""
    return mean_and_error([b - a for a, b in zip(first, second)])


def sign_test(wins: int, losses: int) -> float:
    """How often fair coins would give a result as uneven as this one, or more so. McNemar 1947, exact."""
    tosses = wins + losses
    at_most = min(wins, losses)
    return min(1.0, 2 * sum(math.comb(tosses, k) for k in range(at_most + 1)) / 2**tosses)


def frechet_distance(a: mx.array, b: mx.array) -> float:
    """Squared distance of the normal distributions with the means and covariances of features a (n, f) and b (m, f).

    |μ_a − μ_b|² + tr(Σ_a + Σ_b − 2 (Σ_a^½ Σ_b Σ_a^½)^½): Heusel et al. 2017, equation 6, in a symmetric form.
    """
    mean_a = a.mean(axis=0)
    mean_b = b.mean(axis=0)
    cov_a = (a - mean_a).T @ (a - mean_a) / len(a)
    cov_b = (b - mean_b).T @ (b - mean_b) / len(b)
    values, vectors = mx.linalg.eigh(cov_a, stream=mx.cpu)
    root = (vectors * mx.sqrt(mx.maximum(values, 0))) @ vectors.T
    cross = mx.sqrt(mx.maximum(mx.linalg.eigvalsh(root @ cov_b @ root, stream=mx.cpu), 0)).sum()
    distance = ((mean_a - mean_b) ** 2).sum() + mx.trace(cov_a) + mx.trace(cov_b) - 2 * cross
    return float(distance)
