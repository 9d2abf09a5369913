"""What the tests of the table share: which pairs are in the fast selection."""

from collections.abc import Mapping
from typing import Any

import pytest
from features import FEATURES, Feature, list_pairs
from kinds import KINDS

COVERING = 11
"""Every so many-th pair of a feature is in the fast selection, from another offset on for each
feature: so each feature and each kind is there."""


def split_pairs(
    features: Mapping[str, Feature],
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the pairs of the fast selection, and all others, by the names of feature and kind.

    Args:
        features: by name.
    """
    kinds = [*KINDS]
    numbers = {name: number for number, name in enumerate(FEATURES)}
    fast, full = [], []
    for feature, kind in list_pairs(features):
        is_fast = (kinds.index(kind) + 3 * numbers[feature]) % COVERING == 0
        (fast if is_fast else full).append((feature, kind))
    return fast, full


def parametrize(features: Mapping[str, Feature]) -> Any:
    """Return the mark that runs a test for each pair, most of them in the full run only.

    Args:
        features: by name.
    """
    fast, full = split_pairs(features)
    return pytest.mark.parametrize(
        ("feature", "kind"),
        [
            *(pytest.param(*pair, id="-".join(pair)) for pair in fast),
            *(pytest.param(*pair, id="-".join(pair), marks=pytest.mark.full) for pair in full),
        ],
    )
