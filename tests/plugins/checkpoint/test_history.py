"""The history in a checkpoint: as much of it as can be read again."""

import fulgurite as fg
import pytest
from fulgurite_checkpoint.history import HistoryEncoder, decode_history
from fulgurite_runs.json_codec import MAX_MEMORY, MAX_SIZE, estimate_memory, loads


def make_records(num_records: int, num_scalars: int, name: str) -> list[fg.Record]:
    values = {f"{name}{number}": 1 / 3 for number in range(num_scalars)}
    return [fg.Record("scalars", "train", step, values) for step in range(num_records)]


def test_history_that_fits_is_read_back_whole() -> None:
    records = make_records(10_000, 3, "loss")
    text = HistoryEncoder().encode(records)
    assert list(decode_history(loads(text))) == records


@pytest.mark.full
def test_a_history_of_many_scalars_is_read_back_without_its_oldest_records() -> None:
    """10,000 records of 200 scalars were 85 MiB, and no run could resume from that checkpoint."""
    records = make_records(10_000, 200, "block/gradient_norm")
    text = HistoryEncoder().encode(records)
    assert len(text) < MAX_SIZE
    decoded = list(decode_history(loads(text)))
    assert 1_000 < len(decoded) < 10_000
    assert decoded == records[-len(decoded) :]


@pytest.mark.slow
def test_a_history_of_many_small_values_is_read_back_without_its_oldest_records() -> None:
    values = {"counts": [0] * 10_000}
    records = [fg.Record("scalars", "train", step, values) for step in range(1_000)]
    text = HistoryEncoder().encode(records)
    assert estimate_memory(text) < MAX_MEMORY
    decoded = list(decode_history(loads(text)))
    assert 100 < len(decoded) < 1_000
    assert decoded == records[-len(decoded) :]


@pytest.mark.full
def test_a_record_that_alone_is_too_large_is_left_out() -> None:
    record = fg.Record("scalars", "train", 1, {"text": "x" * MAX_SIZE})
    assert loads(HistoryEncoder().encode([record])) == {"records": []}
