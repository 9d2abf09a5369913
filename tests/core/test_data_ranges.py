"""Numbers that jax would keep as others: they are refused, wherever a batch comes in, and whatever
fits passes through exactly."""

from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import DataError
from models import Act, Counting

FLOAT32_MAX = float(np.finfo(np.float32).max)
F16 = jnp.bfloat16

# An array, and where and what it is, as the message says it.
OUTSIDE = [
    (np.array([0, 2**31 + 5]), "holds 2147483653 at [1], which is outside the range of int32"),
    (np.array([2**31 + 5]), "so it would become -2147483643"),
    (np.array([7, -(2**31) - 1]), "holds -2147483649 at [1]"),
    (
        np.array([2**40], np.uint64),
        "holds 1099511627776 at [0], which is outside the range of uint32",
    ),
    (np.array([2**32], np.uint64), "so it would become 0"),
    (np.array([[1.0, 1e39]]), "holds 1e+39 at [0, 1], which is outside the range of float32"),
    (np.array([np.nan, np.inf, -1e39]), "holds -1e+39 at [2]"),
    (np.array([1 + 1e39j]), "outside the range of complex64"),
    (np.array([2**40, 1], ">i8"), "holds 1099511627776 at [0]"),
]

# What jax keeps, or rounds as everyone expects of it.
INSIDE = [
    np.array([2**31 - 1, -(2**31)]),
    np.array([2**32 - 1, 0], np.uint64),
    np.array([2**32 - 1], np.uint32),
    np.array([FLOAT32_MAX, -FLOAT32_MAX, 1e-50, 0.1]),
    np.array([np.inf, -np.inf, np.nan, 1.0]),
    np.array([1e30 + 1j * np.inf]),
    np.zeros((3, 0), np.int64),
    np.array([1, 3], np.int8),
    np.array([1.5], np.float16),
    np.array([1.5], F16),
    np.array([True]),
    np.array([1j], np.complex64),
]


NARROWED = {"<i8": "i4", "<u8": "u4", "<f8": "f4", "<c16": "c8"}


class Echo(Counting):
    """Predicts its batch."""

    def __init__(self, *, key: Any = None) -> None:
        super().__init__(key=key)

    def predict_step(self, batch: Any, ctx: fg.Context) -> Any:
        return batch


ENGINE = fg.Engine(steps=1, max_compilations=50, autoload=False)


@pytest.mark.parametrize(("array", "message"), OUTSIDE, ids=[text for _, text in OUTSIDE])
def test_a_number_outside_of_the_range_is_refused_wherever_it_comes_in(
    array: np.ndarray, message: str, tmp_path: Path
) -> None:
    batch = {"x": np.zeros(len(array), np.float32), "id": array}
    mapped = np.memmap(tmp_path / "array", array.dtype, "w+", shape=array.shape)
    mapped[:] = array
    on_disk = fg.ArrayData({"id": mapped}, len(array))
    uses = [
        lambda: ENGINE.predict(Echo(), [batch]),
        lambda: ENGINE.evaluate(Echo(), fg.DataSource([batch], prefetch=2)),
        lambda: list(ENGINE.iter_batches(iter([batch]))),
        lambda: fg.ArrayData(batch, 1),
        lambda: next(fg.DataSource([batch], copy=True).device_put()),
        lambda: ENGINE.predict(Echo(), on_disk),
        lambda: next(on_disk.device_put()),
        lambda: fg.ArrayData({"id": mapped}, len(array), on_device=True).device_arrays,
        lambda: ENGINE.step(ENGINE.init_state(Echo, [{"x": 0}]), batch),
    ]
    for use in uses:
        with pytest.raises(DataError) as error:
            use()
        text = str(error.value)
        assert text.startswith("data['id'] holds") and message in text
        assert "jax_enable_x64" in text and "view(np.uint32)" in text and "on the host" in text


@pytest.mark.full
def test_a_fit_trains_up_to_the_batch_with_such_a_number() -> None:
    batches = [
        {"time": np.array([number, 2**31 + 5 - 1 * (number < 3) * 6])} for number in range(5)
    ]
    assert [batch["time"][1] for batch in batches] == [2**31 - 1] * 3 + [2**31 + 5] * 2
    for prefetch, steps_per_execution in ((0, 1), (2, 4)):
        steps: list[int] = []
        engine = fg.Engine(
            steps=5,
            plugins=[Act(1, lambda run, steps=steps: steps.append(run.step))],
            autoload=False,
        )
        data = fg.DataSource(batches, prefetch=prefetch)
        with pytest.raises(DataError, match=r"data\['time'\] holds 2147483653 at \[1\]") as error:
            engine.fit(Counting, data, steps_per_execution=steps_per_execution)
        assert error.value.__notes__[0] == "while the data source made the batch for step 4"
        assert steps == [1, 2, 3]


def test_a_number_of_python_outside_of_the_range_is_refused() -> None:
    for number in (2**31, 2**63, 1e39, -1e300):
        with pytest.raises(DataError, match=r"data\['scale'\] holds .* outside the range"):
            ENGINE.predict(Echo(), [{"scale": number}])
    with pytest.raises(DataError, match="too large for 64 bits"):
        ENGINE.predict(Echo(), [{"scale": 2**64}])


@pytest.mark.parametrize("array", INSIDE, ids=lambda array: f"{array.dtype}{array.tolist()}")
def test_what_fits_passes_through_exactly(array: np.ndarray) -> None:
    # By NumPy, which rounds to the nearest.
    expected = array.astype(NARROWED.get(array.dtype.str, array.dtype))
    for data in ([array], fg.ArrayData(array, len(array))):
        preds = ENGINE.predict(Echo(), data)
        assert preds.dtype == expected.dtype and preds.tobytes() == expected.tobytes()


def test_ids_of_64_bits_pass_through_predict_in_two_words_with_x64_or_beside_the_batch() -> None:
    ids = np.array([2**40 + 7, 2**63 + 1, 5, 2**64 - 1, 0], np.uint64)
    x = np.arange(5, dtype=np.float32)
    words = ids.view(np.uint32).reshape(-1, 2)
    preds = ENGINE.predict(Echo(), fg.ArrayData({"x": x, "id": words}, 2))
    assert preds["id"].reshape(-1).view(np.uint64).tolist() == ids.tolist()
    with jax.enable_x64(True):
        for prefetch in (0, 2):  # a thread reads with the setting of the one that it reads for
            data = fg.DataSource(fg.ArrayData({"x": x, "id": ids}, 2), prefetch=prefetch)
            assert ENGINE.predict(Echo(), data)["id"].tolist() == ids.tolist()
            lists = fg.DataSource([{"x": x, "id": ids}], prefetch=prefetch)
            assert ENGINE.predict(Echo(), lists)["id"].tolist() == ids.tolist()
    # On the host, in the order of the data, padding left out.
    names = [f"file {id}" for id in ids]
    padded = fg.ArrayData({"x": x}, 2, remainder="pad")
    together = dict(zip(names, ENGINE.predict(Echo(), padded)["x"].tolist(), strict=True))
    assert together == {f"file {id}": float(number) for number, id in enumerate(ids)}


def test_values_are_looked_at_only_where_a_dtype_would_be_narrowed() -> None:
    # One number, seen as many: to look at each would take hours.
    source = [np.broadcast_to(np.zeros((), dtype), 2**45) for dtype in ("f4", "i4", "u1", bool)]
    assert len(list(ENGINE.iter_batches([source]))) == 1
