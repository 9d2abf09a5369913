"""Run by `test_throughput.py` with two simulated devices: what is counted is that of both."""

import math

from fulgurite_monitor import Throughput
from fulgurite_sharding import DataParallel
from monitored import LINE_FLOPS, fit, make_rows

for throughput in (Throughput(peak_flops=1e14, flops_per_step=1e12), Throughput(peak_flops=1e14)):
    records, _ = fit(throughput, make_rows(64), plugins=[DataParallel()])
    flops = throughput.flops_per_step or LINE_FLOPS
    for values in records.values:
        batches = values["batches_per_second"]
        assert values["peak_flops_per_second"] == 2e14
        assert math.isclose(values["mfu"], batches * flops / 2e14), values
        assert math.isclose(values["examples_per_second"], batches * 8), values
