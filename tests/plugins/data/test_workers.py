"""Batches that threads and processes read: the same ones, and errors that say what happened."""

import gc
import multiprocessing
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite.plugins import BatchIterator
from fulgurite_data import Arrays, Batches, Tokens, mix, write_tokens
from fulgurite_testing import check_source
from worker_functions import (
    add_noise,
    die_at_nine,
    die_or_never_end,
    divide_by_jax,
    fail_at_two,
    fail_unreadably,
)

PROCESSES = pytest.param({"processes": 2}, marks=pytest.mark.full, id="processes")
"""Each takes seconds to start."""
WORKERS: list[Any] = [
    pytest.param({}, id="none"),
    pytest.param({"threads": 4}, id="threads"),
    PROCESSES,
]


def build_batches(**workers: int) -> Batches:
    dataset = Arrays({"x": np.arange(30)}).shuffle()
    return dataset.map(add_noise, rng=True, **workers).batch(4, remainder="pad")


def read_all(batches: Batches, **options: Any) -> list[list[int]]:
    return [b.value["x"].tolist() for b in batches.iter_epoch(1, seed=3, **options)]


@pytest.mark.parametrize("workers", WORKERS[1:])
def test_workers_change_no_batch_and_no_position(workers: dict[str, Any]):
    plain, other = build_batches(), build_batches(**workers)
    assert other.get_identity() == plain.get_identity()
    assert read_all(other) == read_all(plain)
    assert read_all(other, start=5) == read_all(plain)[5:]
    assert read_all(other, process=(1, 2)) == read_all(plain, process=(1, 2))
    # A walk that was left in the middle disturbs none that comes later, or continues beside it.
    half = other.iter_epoch(1, seed=3)
    first = [batch.value["x"].tolist() for batch in islice(half, 3)]
    assert read_all(other) == read_all(plain)
    assert first + [batch.value["x"].tolist() for batch in half] == read_all(plain)
    left: Any = other.iter_epoch(0, seed=9)
    next(left)
    left.close()
    assert read_all(other) == read_all(plain)


@pytest.mark.parametrize("workers", WORKERS)
def test_functions_that_use_jax_keep_64_bits_in_workers_where_the_reader_does(
    workers: dict[str, Any],
):
    batches = Arrays({"x": np.arange(4.0)}).map(divide_by_jax, **workers).batch(4)
    with jax.enable_x64(True):
        (batch,) = batches.iter_epoch(0, seed=0)
    assert batch["x"].dtype == np.float64
    assert batch["x"].tolist() == [0, 1 / 3, 2 / 3, 1]


def test_a_run_may_resume_with_other_workers():
    with BatchIterator(build_batches(threads=4), seed=0) as items:
        position = [item.position for item in islice(items, 5)][-1]
    rests = []
    for workers in ({}, {"threads": 4}):
        with BatchIterator(build_batches(**workers), seed=0, position=position) as items:
            rests.append([item.batch.value["x"].tolist() for item in islice(items, 10)])
    assert rests[0] == rests[1]
    check_source(lambda: build_batches(threads=3))


@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_of_a_function_is_that_of_the_user_from_workers_too(workers: dict[str, Any]):
    batches = Arrays({"x": np.arange(10)}).map(fail_at_two, **workers).batch(5)
    with pytest.raises(ValueError, match="no two") as caught:
        list(batches)
    assert caught.value.__notes__[0] == "in map(fail_at_two), of example 2 of Arrays"
    assert caught.value.__notes__[1] == "while batch 0 of batch(5, 'keep') was read"


@pytest.mark.full
def test_a_process_that_dies_is_an_error_that_names_it_and_its_signal():
    batches = Arrays({"x": np.arange(40)}).map(die_at_nine, processes=2).batch(4)
    received = []
    with pytest.raises(
        DataError,
        match=r"worker process 0 of 2 \(pid \d+\) died with signal SIGKILL before batch 2 of epoch 0",
    ):
        received.extend(batch["x"].tolist() for batch in batches)
    # Those of the other process, unless it is slow.
    assert received == [[0, 1, 2, 3], [4, 5, 6, 7]][: len(received)]


@pytest.mark.full
def test_a_process_that_dies_is_told_while_another_one_reads_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fulgurite_data.workers._PATIENCE", 0.5)
    batches = Arrays({"x": np.arange(8)}).map(die_or_never_end, processes=2).batch(4)
    with pytest.raises(DataError, match=r"worker process 1 of 2 .* SIGKILL before batch 1 of"):
        next(iter(batches))


@pytest.mark.full
def test_an_exception_that_no_process_can_send_is_told_in_words():
    batches = Arrays({"x": np.arange(4)}).map(fail_unreadably, processes=1).batch(2)
    with pytest.raises(DataError) as caught:
        list(batches)
    assert str(caught.value) == "in a worker process: Unreadable: 1 and 2"
    notes = caught.value.__notes__
    assert notes[0] == "in map(fail_unreadably), of example 0 of Arrays"
    assert "raise Unreadable(1, 2)" in notes[-1]


def test_a_function_that_cannot_be_sent_is_refused_with_what_to_do():
    batches = Arrays({"x": np.arange(4)}).map(lambda example: example, processes=1).batch(2)
    with pytest.raises(ConfigurationError, match="at the top level of a module"):
        next(iter(batches))


@pytest.mark.full
def test_processes_map_the_files_themselves_and_end_with_their_batches(tmp_path: Path):
    write_tokens(tmp_path / "a.bin", [range(100), range(100, 150)])
    np.save(tmp_path / "b.npy", np.arange(100, dtype=np.int32).reshape(10, 10))
    arrays = Arrays({"tokens": np.load(tmp_path / "b.npy", mmap_mode="r")})
    windows = Tokens(tmp_path / "a.bin").window(10, targets=False)
    both = mix([windows, arrays])
    plain = [batch["tokens"].tolist() for batch in both.batch(4)]
    batches = both.map(dict, processes=1).batch(4)
    assert [batch["tokens"].tolist() for batch in batches] == plain
    names = {process.name for process in multiprocessing.active_children()}
    assert "fulgurite-data-0" in names
    del batches
    gc.collect()
    assert not multiprocessing.active_children()


def test_threads_end_with_the_walk():
    batches = build_batches(threads=4)
    walk: Any = batches.iter_epoch(0, seed=0)
    next(walk)
    walk.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("fulgurite-data")]


def test_numbers_of_workers_that_make_no_sense_are_refused():
    dataset = Arrays({"x": np.arange(4)})
    with pytest.raises(ConfigurationError, match="threads is -1"):
        dataset.map(dict, threads=-1)
    with pytest.raises(ConfigurationError, match="choose one kind"):
        dataset.map(dict, threads=2).map(dict, processes=2)
