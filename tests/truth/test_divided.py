"""Accumulation in both modes, and what is used with it, against the oracle over undivided batches."""

from collections.abc import Callable

import pytest
from columns import DIVIDED
from table import check_pair, parametrize


@pytest.mark.full
@parametrize(DIVIDED)
def test_divided_is_that_of_the_oracle(
    feature: str, kind: str, record_property: Callable[[str, object], None]
) -> None:
    record_property(f"truth: {check_pair(feature, kind)}", 1)
