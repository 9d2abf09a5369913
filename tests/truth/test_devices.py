"""Training and evaluation divided over eight simulated devices, against the oracle on one."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from columns import ON_EIGHT
from table import split_pairs

PAIRS = split_pairs(ON_EIGHT)


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(PAIRS.fast, id="some", marks=pytest.mark.full),
        pytest.param(PAIRS.slow, id="others", marks=pytest.mark.slow),
    ],
)
def test_what_eight_devices_compute_is_that_of_the_oracle(
    pairs: list[tuple[str, str]], record_property: Callable[[str, object], None]
) -> None:
    program = Path(__file__).with_name("eight.py")
    run = subprocess.run(
        [sys.executable, program, *("-".join(pair) for pair in pairs)],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    outcomes = json.loads(run.stdout.splitlines()[-1])
    for outcome, count in Counter(outcomes.values()).items():
        record_property(f"truth: {outcome}", count)
    failures = {
        pair: outcome
        for pair, outcome in outcomes.items()
        if outcome not in ("equal", "refused", "told")
    }
    assert not failures, "\n".join(failures.values())
    assert len(outcomes) == len(pairs)
