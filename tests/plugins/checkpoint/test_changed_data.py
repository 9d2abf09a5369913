"""What a run says that is resumed with other data than it was started with."""

from pathlib import Path

import numpy as np
import pytest
from fulgurite import ArrayData
from fulgurite.errors import DataError
from fulgurite_checkpoint import Checkpointer
from trained import Counting, engine


def test_a_changed_batch_size_is_named_with_the_one_of_the_run(tmp_path: Path) -> None:
    x = np.ones((64, 1), np.float32)

    def fit(batch_size: int, steps: int) -> None:
        trainer = engine(tmp_path / "run", Checkpointer(every=5), steps=steps, log_every=None)
        trainer.fit(Counting, ArrayData(x, batch_size), resume="auto")

    fit(8, 13)  # five batches into the second epoch
    with pytest.raises(DataError, match="its epochs have 4 batches.* the batch size") as caught:
        fit(16, 20)
    assert "batch_size=16" in str(caught.value)
    assert any(
        "the run's data was ArrayData(batch_size=8" in note for note in caught.value.__notes__
    )
    fit(8, 20)
