"""Whether a larger or a smaller value of a metric is better, and whether one is."""

from typing import Any

import pytest
from fulgurite.errors import ConfigurationError
from fulgurite.metrics import is_better, rank, resolve_mode


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [
        ("val/loss", "min"),
        ("train/loss_average", "min"),
        ("test/generator/batch_loss", "min"),
        ("test/top-5 error", "min"),
        ("test/accuracy", "max"),
        ("test/top3_accuracy", "max"),
        ("loss/F1", "max"),
        ("test/ndcg_10", "max"),
        ("test/brier", "min"),
    ],
)
def test_names_that_tell(monitor: str, mode: str) -> None:
    assert resolve_mode(monitor, None, "X") == mode


@pytest.mark.parametrize(
    "monitor",
    [
        "test/score",
        "test/flossy",
        "test/loss/accuracy_loss",
        # As scikit-learn calls what is the larger, the better.
        "test/neg_mean_squared_error",
        "test/negative-loss",
    ],
)
def test_names_that_do_not_tell_need_a_mode(monitor: str) -> None:
    with pytest.raises(ConfigurationError, match=r"X: is a larger or a smaller .* mode='max' or"):
        resolve_mode(monitor, None, "X")
    assert resolve_mode(monitor, "min", "X") == "min"


def test_a_mode_of_another_name_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="mode is 'most'; choose 'max' or 'min'"):
        resolve_mode("val/loss", "most", "X")  # type: ignore[arg-type]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "best", "mode", "tolerances", "expected"),
    [
        (0.9, 0.9, "max", {"rtol": 1e-4}, False),
        (0.9001, 0.9, "max", {"rtol": 1e-3}, False),
        (0.901, 0.9, "max", {"rtol": 1e-3}, True),
        (-5.0, -5.0, "min", {"rtol": 1e-4}, False),
        (-5.4, -5.0, "min", {"rtol": 0.1}, False),
        (-5.6, -5.0, "min", {"rtol": 0.1}, True),
        (-4.4, -5.0, "max", {"rtol": 0.1}, True),
        (-4.6, -5.0, "max", {"rtol": 0.1}, False),
        (-0.6, 0.0, "min", {"rtol": 0.5, "atol": 0.5}, True),
        (-0.4, 0.0, "min", {"rtol": 0.5, "atol": 0.5}, False),
        (0.0, 0.0, "min", {}, False),
        (-1e-30, 0.0, "min", {}, True),
        (3, 4, "min", {"atol": 1}, False),
        (2, 4, "min", {"atol": 1}, True),
        (1e308, -1e308, "max", {"rtol": 1.0}, True),
        (1e9, None, "min", {}, True),
        (1e9, INF, "min", {"rtol": 0.1}, True),
        (1e9, -INF, "min", {"rtol": 0.1}, True),
        (-1e9, INF, "max", {}, True),
        (0.0, NAN, "max", {}, True),
        (NAN, 0.0, "min", {}, False),
        (-INF, 0.0, "min", {}, False),
        (INF, 0.0, "max", {}, False),
        (-INF, None, "min", {}, False),
        (NAN, NAN, "min", {}, False),
    ],
)
def test_a_value_is_better_by_more_than_a_part_of_the_size_of_the_best(
    value: float, best: float | None, mode: Any, tolerances: dict[str, float], expected: bool
) -> None:
    assert is_better(value, best, mode, **tolerances) is expected


def test_values_are_ranked_with_those_that_are_not_finite_last() -> None:
    values = [2.0, NAN, -1.0, -INF, 2.0, INF]
    assert rank(values, "min") == [2, 0, 4, 1, 3, 5]
    assert rank(values, "max") == [0, 4, 2, 1, 3, 5]
    assert rank([], "max") == []
