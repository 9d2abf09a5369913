"""What was found out in a pass over all examples is kept in a file, and belongs to its dataset."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fulgurite.errors import DataError
from fulgurite_data import Arrays, Tokens, write_tokens


class Reads:
    """A predicate that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, example: Any) -> bool:
        self.count += 1
        return example["x"] % 3 == 0


def test_a_filter_looks_at_its_examples_once_for_all_starts(tmp_path: Path):
    path, predicate = tmp_path / "filter.npz", Reads()
    dataset = Arrays({"x": np.arange(20)})
    first = dataset.filter(predicate, path=path)
    second = dataset.filter(predicate, path=path)
    assert predicate.count == 20
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
