"""How fast a run of Fulgurite is, what its devices do, where its time went, and alerts."""

__tracebackhide__ = True

from fulgurite.plugins import count_flops as count_flops, count_model_flops as count_model_flops

from fulgurite_monitor.alert import Alert as Alert
from fulgurite_monitor.alert_actions import (
    AlertEvent as AlertEvent,
    NotifyCommand as NotifyCommand,
    Webhook as Webhook,
)
from fulgurite_monitor.devices import DeviceStatistics as DeviceStatistics
from fulgurite_monitor.goodput import Goodput as Goodput
from fulgurite_monitor.ledger import (
    AttemptTimes as AttemptTimes,
    GoodputReport as GoodputReport,
    read_goodput as read_goodput,
)
from fulgurite_monitor.peaks import PEAKS as PEAKS, Peak as Peak, find_peak as find_peak
from fulgurite_monitor.rates import RateWindow as RateWindow
from fulgurite_monitor.throughput import Throughput as Throughput
