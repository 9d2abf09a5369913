"""What was trained, outside of its process: weights in a directory, and no pickle."""

import copy
import pickle
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import numpy as np
import pytest
from fulgurite.errors import CheckpointError
from fulgurite_checkpoint import Checkpointer, save_weights
from fulgurite_runs import RunDirectory
from trained import NET, Average, regression


@pytest.mark.full
def test_weights_of_a_result_are_read_by_another_engine(tmp_path: Path) -> None:
    engine = fg.Engine(steps=3, plugins=[Average()])
    result = engine.fit(NET, regression())
    save_weights(result, tmp_path / "weights")
    assert RunDirectory(tmp_path / "weights").is_complete
    assert RunDirectory(tmp_path / "weights").read_manifest()["configuration"] is None
    other = fg.Engine(steps=1, plugins=[Checkpointer(1), Average()])
    loaded = other.load_weights(NET, tmp_path / "weights")
    assert int(loaded.step) == 3
    for name in ("module", "model_state", "plugin_states"):
        expected, arrays = (
            eqx.filter(getattr(state, name), eqx.is_array) for state in (result.state, loaded)
        )
        assert eqx.tree_equal(expected, arrays), name
    with pytest.raises(CheckpointError, match="already exists: choose another path"):
        save_weights(result.state, tmp_path / "weights")
    with pytest.raises(CheckpointError, match="weights alone, without the state of the optimizer"):
        other.fit(NET, regression(), resume=tmp_path / "weights")


@pytest.mark.parametrize("use", [pickle.dumps, copy.deepcopy])
def test_engines_and_results_say_what_to_do_instead_of_pickling_them(use: Any) -> None:
    engine = fg.Engine(steps=1, plugins=[Average()])
    with pytest.raises(TypeError, match="Engine cannot be pickled or copied: hand over a function"):
        use(engine)
    result = fg.FitResult(*[None] * 3, fg.History(), {}, *[None] * 2, {}, [])  # pyright: ignore
    with pytest.raises(TypeError, match=r"fulgurite_checkpoint\.save_weights\(result, path\)"):
        use(result)


@pytest.mark.full
def test_a_batch_of_another_dtype_is_told_of() -> None:
    batches = list(regression())[:3]
    half = {**batches[2], "x": batches[2]["x"].astype(np.float16)}
    with pytest.warns(
        UserWarning, match="step 3 has another dtype .*: x is float16, not float32. The step is"
    ):
        fg.Engine(steps=4).fit(NET, [*batches[:2], half, half])
