"""Evaluations over batches of unequal size, against the oracle over all examples at once."""

from collections.abc import Callable

from columns import EVALUATION
from table import check_pair, parametrize


@parametrize(EVALUATION)
def test_evaluation_is_that_of_the_oracle(
    feature: str, kind: str, record_property: Callable[[str, object], None]
) -> None:
    record_property(f"truth: {check_pair(feature, kind)}", 1)
