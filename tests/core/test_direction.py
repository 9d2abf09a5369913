"""Whether a larger or a smaller value of a metric is better."""

import pytest
from fulgurite.errors import ConfigurationError
from fulgurite.metrics.direction import resolve_mode


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


@pytest.mark.parametrize("monitor", ["test/score", "test/flossy", "test/loss/accuracy_loss"])
def test_names_that_do_not_tell_need_a_mode(monitor: str) -> None:
    with pytest.raises(ConfigurationError, match=r"X: is a larger or a smaller .* mode='max' or"):
        resolve_mode(monitor, None, "X")
    assert resolve_mode(monitor, "min", "X") == "min"


def test_a_mode_of_another_name_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="mode is 'most'; choose 'max' or 'min'"):
        resolve_mode("val/loss", "most", "X")  # type: ignore[arg-type]
