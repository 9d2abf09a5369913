"""Where trials run, and which devices they get."""

from pathlib import Path

import pytest
from fulgurite.errors import ConfigurationError
from fulgurite_sweeps.executors import divide_devices, find_devices
from fulgurite_sweeps.failures import find_error_line
from fulgurite_sweeps.workers import parse_executor


def test_devices_are_divided_among_trials_and_shared_where_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert divide_devices([], 2) == [{}, {}]
    assert divide_devices(["0", "1", "2", "3"], 2) == [
        {"CUDA_VISIBLE_DEVICES": "0,2"},
        {"CUDA_VISIBLE_DEVICES": "1,3"},
    ]
    shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.450"}
    assert divide_devices(["4", "7"], 3) == [
        {"CUDA_VISIBLE_DEVICES": "4"} | shared,
        {"CUDA_VISIBLE_DEVICES": "7"} | shared,
        {"CUDA_VISIBLE_DEVICES": "4"} | shared,
    ]


def test_only_devices_that_this_process_may_use_are_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-8f1a")
    assert find_devices() == ["2", "GPU-8f1a"]
    # As CUDA reads it: an invalid one hides itself and all behind it.
    for hidden in ("-1", "", "2,-1,3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert find_devices() == hidden.split(",")[:1] * (hidden == "2,-1,3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_devices() == []


def test_workers_are_local_ones_with_a_number() -> None:
    assert parse_executor("local").num_slots == 1
    assert parse_executor("local:3").num_slots == 3
    for text in ("local:0", "local:x", "local(2)", "lokal:2", "3"):
        with pytest.raises(ConfigurationError, match="give"):
            parse_executor(text)


def test_the_error_of_a_trial_is_not_what_python_ignores_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "trial-0.log"
    ignored = (
        "Exception ignored in: <function Data.__del__ at 0x7f>\nTraceback (most recent call last):\n"
        "  File \"data.py\", line 3, in __del__\nAttributeError: 'NoneType' has no 'close'\n"
    )
    error = "MemoryError: RESOURCE_EXHAUSTED: out of memory\n"
    for text in (error + ignored, ignored + error, ignored + error + ignored):
        log.write_text(text)
        assert find_error_line(log, 0) == error.strip()
