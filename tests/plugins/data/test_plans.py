"""What was found out in a pass over all examples is kept in a file, and belongs to its dataset."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_data import (
    Arrays,
    Images,
    Items,
    JSONLines,
    Parquet,
    Tokens,
    compute_statistics,
    write_tokens,
)
from PIL import Image

num_calls = 0


def is_third(example: Any) -> bool:
    global num_calls
    num_calls += 1
    return example["x"] % 3 == 0


def test_a_filter_looks_at_its_examples_once_for_all_starts(tmp_path: Path):
    path, predicate, before = tmp_path / "filter.npz", is_third, num_calls
    dataset = Arrays({"x": np.arange(20)})
    first = dataset.filter(predicate, path=path)
    second = dataset.filter(predicate, path=path)
    assert num_calls - before == 20
    numbers = [0, 3, 6, 9, 12, 15, 18]
    assert [e["x"] for e in first.iter_examples()] == numbers
    assert [e["x"] for e in second.iter_examples()] == numbers
    assert first.batch(2).get_identity() == second.batch(2).get_identity()
    with pytest.raises(DataError, match=r"has the plan of Arrays\(20.*not of Arrays\(21"):
        Arrays({"x": np.arange(21)}).filter(predicate, path=path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"filter\.npz does not hold a plan.*Remove it"):
        dataset.filter(predicate, path=path)


@pytest.mark.parametrize("how", ["first_fit", "best_fit", "split"])
def test_rows_are_planned_once_for_all_starts(tmp_path: Path, how: Any):
    lengths = np.random.default_rng(0).integers(1, 9, 50)
    tokens = Tokens(write_tokens(tmp_path / "a.bin", [range(n) for n in lengths]))
    path = tmp_path / "rows.npz"
    plain = tokens.pack(16, how=how)
    for _ in range(2):
        packed = tokens.pack(16, how=how, path=path)
        assert len(packed) == len(plain)
        rows, expected = (dataset.read(np.arange(len(plain))) for dataset in (packed, plain))
        assert all((rows[name] == expected[name]).all() for name in expected)
    with pytest.raises(DataError, match="remove it, or choose another path"):
        tokens.pack(17, how=how, path=path)


LIMIT = 3


def is_small(example: Any) -> bool:
    return example["x"] < LIMIT


def test_the_plan_of_a_filter_is_not_that_of_other_contents_or_predicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def make_predicate(limit: Any) -> Any:
        return lambda example: example["x"] < limit

    path, numbers = tmp_path / "filter.npz", np.arange(10)
    assert len(Arrays({"x": numbers}).filter(make_predicate(3), path=path)) == 3
    assert len(Arrays({"x": numbers.copy()}).filter(make_predicate(3), path=path)) == 3
    for values, predicate in (
        (numbers, make_predicate(8)),
        (numbers[::-1], make_predicate(3)),
        (numbers, lambda example: example["x"] > 3),
    ):
        with pytest.raises(DataError, match="remove it, or choose another path"):
            Arrays({"x": values}).filter(predicate, path=path)
    dataset = Arrays({"x": numbers})
    assert len(dataset.filter(is_small, path=tmp_path / "global.npz")) == 3
    monkeypatch.setattr(f"{__name__}.LIMIT", 8)
    with pytest.raises(DataError, match="remove it, or choose another path"):
        dataset.filter(is_small, path=tmp_path / "global.npz")
    allowed = [1, 2]
    assert len(dataset.filter(lambda e: e["x"] in allowed, path=tmp_path / "list.npz")) == 2
    allowed.append(5)
    with pytest.raises(DataError, match="remove it, or choose another path"):
        dataset.filter(lambda e: e["x"] in allowed, path=tmp_path / "list.npz")
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigurationError, match=r"rng in .*a Generator.*cannot be looked into"):
        dataset.filter(lambda e: rng.random() < 2, path=tmp_path / "rng.npz")


@pytest.mark.parametrize("how", ["first_fit", "split"])
def test_rows_planned_for_other_lengths_are_refused(tmp_path: Path, how: Any):
    def write(lengths: tuple[int, ...]) -> JSONLines:
        lines = [json.dumps({"x": [10 + n] * length}) for n, length in enumerate(lengths)]
        (tmp_path / "z.jsonl").write_text("\n".join(lines) + "\n")
        return JSONLines(tmp_path / "z.jsonl")

    path = tmp_path / "rows.npz"
    assert write((3, 3, 2)).pack(6, how=how, path=path).get(0)["x"].tolist() == [10] * 3 + [11] * 3
    with pytest.raises(DataError, match="remove it, or choose another path"):
        write((2, 3, 3)).pack(6, how=how, path=path)
    # A sequence of a kind that is read here and there: one whose other items changed.
    lengths = [3] * 1000
    items = [{"x": np.full(n, 1)} for n in lengths]
    packed = Items(Sequence(items)).pack(6, how=how, path=tmp_path / "items.npz")
    assert len(packed) == 500
    items[7] = {"x": np.full(6, 1)}
    stale = Items(Sequence(items)).pack(6, how=how, path=tmp_path / "items.npz")
    assert stale.get(0)["x"].tolist() == [1] * 6
    with pytest.raises(
        DataError, match=r"example 7 of Sequence has 6 elements, and 3 when"
    ) as raised:
        stale.get(3)
    assert "items.npz" in raised.value.__notes__[0]


class Sequence:
    """Items, but not a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_files_of_equal_sizes_with_other_bytes_are_other_data(tmp_path: Path):
    def write(low: int) -> list[Any]:
        (tmp_path / "a.jsonl").write_text(f'{{"x": {low}}}\n{{"x": 2}}\n')
        parquet.write_table(pa.table({"x": np.arange(low, low + 9)}), tmp_path / "a.parquet")
        image = np.full((4, 4, 3), low, np.uint8)
        Image.fromarray(image).save(tmp_path / "1.bmp")
        np.full((10, 3), low).tofile(tmp_path / "a.raw")
        mapped = np.memmap(tmp_path / "a.raw", np.int64, "r", shape=(10, 3))
        return [
            JSONLines(tmp_path / "a.jsonl"),
            Parquet(tmp_path / "a.parquet"),
            Images(tmp_path),
            Arrays({"x": mapped}),
            Items([{"x": low}, {"x": 2}]),
        ]

    first = [dataset.batch(1).get_identity() for dataset in write(1)]
    other = [dataset.batch(1).get_identity() for dataset in write(7)]
    again = [dataset.batch(1).get_identity() for dataset in write(1)]
    assert all(lines != others for lines, others in zip(first, other, strict=True))
    assert again == first


def test_of_large_data_a_bounded_part_is_looked_at(tmp_path: Path):
    # Sparse: it takes no room, and would take minutes to be read.
    values = np.memmap(tmp_path / "large.raw", np.uint8, "w+", shape=(10**7, 1000))
    before = Arrays({"x": values}).batch(2).get_identity()
    values[-1] = 1
    assert Arrays({"x": values}).batch(2).get_identity() != before


@pytest.mark.full
def test_an_identity_is_the_same_in_another_process(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np\n"
        "from fulgurite_data import Arrays\n"
        "def make(names, limit):\n"
        "    return lambda e: {'x': e['x'] + limit, 'y': len(names) + (e['x'] in {1, 'a', 'b'})}\n"
        "dataset = Arrays({'x': np.arange(9)}).map(make(frozenset('abcdef'), np.ones(3)))\n"
        "print(dataset.batch(2).get_identity())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_starts_at_the_same_time_write_one_plan_and_one_file_of_statistics(tmp_path: Path):
    count = 4
    barrier = threading.Barrier(count)
    values = np.arange(20_000.0)

    class Waiting:
        """A sequence whose last part all starts read at the same time."""

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if index == 7:
                barrier.wait(60)
            return {"x": values}

    def start() -> tuple[int, list[float]]:
        dataset = Items(Waiting())
        filtered = dataset.filter(lambda example: True, path=tmp_path / "plan.npz")
        statistics = compute_statistics(dataset, "x", per="element", path=tmp_path / "x.json")
        return len(filtered), statistics.mean["x"][[0, -1]].tolist()

    with ThreadPoolExecutor(count) as executor:
        results = [future.result() for future in [executor.submit(start) for _ in range(count)]]
    assert results == [(8, [0.0, 19_999.0])] * count
    assert {path.name for path in tmp_path.iterdir()} == {"plan.npz", "x.json"}
