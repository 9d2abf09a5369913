"""Which source each place of a mixture is of: a rule for exact proportions at every prefix.

Of the first `m` places the first source has `ceil(m * w / W)`, where `w` is its weight and `W` the
sum; the others share the rest by the same rule. So each place can be computed alone. The order is
that of the mixtures of Grain.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from fulgurite_data.indexing import ENDLESS

_SCALE = 2**20
"""The sum of the integers that stand for weights which are not in simple proportions."""
_MAX_PRODUCT = 2**31
"""Sums of weights up to here have products that int64 holds."""


class Proportions:
    """A division of places among sources by fixed weights.

    Args:
        weights: integers that are not negative, one a source, not all 0.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        self.total = sum(weights)

    def count(self, places: np.ndarray) -> np.ndarray:
        """Return how many of the first places each source has, int64 `(sources, k)`.

        Args:
            places: numbers of places, int64 `(k,)`.
        """
        rounds, rest = np.divmod(places, self.total)
        if self.total > _MAX_PRODUCT:
            rest = rest.astype(object)  # integers of Python
        counts = np.empty((len(self.weights), len(places)), np.int64)
        total = self.total
        for number, weight in enumerate(self.weights):
            part = -(-rest * weight // total) if total else rest
            counts[number] = rounds * weight + part
            rest = rest - part
            total -= weight
        return counts

    def find_length(self, sizes: Sequence[int]) -> int:
        """Return how many places there are before the first one whose source has no element left.

        Args:
            sizes: the number of elements of each source.
        """
        # After `size // weight + 1` rounds of all proportions, a source has fewer elements than
        # places.
        limits = [
            (size // weight + 1) * self.total
            for size, weight in zip(sizes, self.weights, strict=True)
            if weight and size < ENDLESS
        ]
        low, high = 0, min([*limits, ENDLESS])
        if high == ENDLESS:
            return ENDLESS
        # Counts only grow with the number of places.
        while low + 1 < high:
            middle = (low + high) // 2
            counts = self.count(np.array([middle]))[:, 0].tolist()
            is_there = all(count <= size for count, size in zip(counts, sizes, strict=True))
            low, high = (middle, high) if is_there else (low, middle)
        return low

    def find_cover(self, sizes: Sequence[int]) -> int:
        """Return how many places there are until each source was read to its end.

        Args:
            sizes: the number of elements of each source.
        """
        if max(sizes) >= ENDLESS:
            return ENDLESS
        low, high = 0, min(max(sizes) * self.total, ENDLESS)
        while low < high:
            middle = (low + high) // 2
            counts = self.count(np.array([middle]))[:, 0]
            is_enough = all(
                count >= size or not weight
                for count, size, weight in zip(counts.tolist(), sizes, self.weights, strict=True)
            )
            low, high = (low, middle) if is_enough else (middle + 1, high)
        return low


def as_integers(weights: Sequence[float]) -> list[int]:
    """Return integers in the proportions of weights; exact for integers and for fractions of small
    denominators such as 0.7, otherwise to one in a million.

    Args:
        weights: numbers that are not negative, not all 0.
    """
    fractions = [Fraction(weight).limit_denominator(1000) for weight in weights]
    is_exact = all(
        abs(fraction - Fraction(weight)) <= Fraction(weight) / 10**9
        for fraction, weight in zip(fractions, weights, strict=True)
    )
    if is_exact:
        scale = lcm(*(fraction.denominator for fraction in fractions))
        integers = [int(fraction * scale) for fraction in fractions]
        divisor = gcd(*integers)
        if sum(integers) // divisor < ENDLESS:
            return [integer // divisor for integer in integers]
    total = sum(map(Fraction, weights))
    scaled = [Fraction(weight) / total * _SCALE for weight in weights]
    return [max(round(value), 1) if value else 0 for value in scaled]
