"""What every plugin promises holds for the monitors: no number changes, and nothing waits for the
device."""

from collections.abc import Callable
from typing import Any

import pytest
from fulgurite_monitor import Alert, DeviceStatistics, Goodput, Throughput
from fulgurite_testing import check_plugin


@pytest.mark.full
@pytest.mark.parametrize(
    "make",
    [Throughput, DeviceStatistics, Goodput, lambda: Alert("train/loss > 0.1", do=[str])],
    ids=["throughput", "devices", "goodput", "alert"],
)
def test_monitor_keeps_the_promises_of_plugins(make: Callable[[], Any]) -> None:
    check_plugin(make)
