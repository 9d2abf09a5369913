"""Training over whole batches, with and without plugins, against the oracle."""

from collections.abc import Callable

import pytest
from columns import TRAINING
from table import check_pair, parametrize


@pytest.mark.full
@parametrize(TRAINING)
def test_training_is_that_of_the_oracle(
    feature: str, kind: str, record_property: Callable[[str, object], None]
) -> None:
    record_property(f"truth: {check_pair(feature, kind)}", 1)
