"""What the tests of the table share: the pairs as parameters, and how their outcomes are counted."""

from collections.abc import Mapping
from typing import Any

import pytest
from features import Feature, list_pairs

COVERING = 11
"""Of the pairs of a feature, every so many-th is in the fast selection, with another offset for
each feature: so each feature and each kind is there."""


def parametrize(features: Mapping[str, Feature]) -> Any:
    """Return the mark that runs a test for each pair of features and kinds, most of them `full`.

    Args:
        features: by name.
    """
    numbers = {name: number for number, name in enumerate(features)}
    kinds: dict[str, int] = {}
    params = []
    for feature, kind in list_pairs(features):
        index = kinds[feature] = kinds.get(feature, -1) + 1
        is_fast = (index + 3 * numbers[feature]) % COVERING == 0
        marks = [] if is_fast else [pytest.mark.full]
        params.append(pytest.param(feature, kind, id=f"{feature}-{kind}", marks=marks))
    return pytest.mark.parametrize(("feature", "kind"), params)
