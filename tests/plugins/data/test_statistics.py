"""Statistics of datasets against NumPy over the whole array, and what is done with them."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_data import Arrays, Items, MapOnDevice, Statistics, compute_statistics


def make_images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (700, 4, 5, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("per", "axes"), [("channel", (0, 1, 2)), ("element", (0,)), ("array", (0, 1, 2, 3))]
)
def test_statistics_are_those_of_the_whole_array(per: Any, axes: tuple[int, ...]):
    images = make_images()
    statistics = compute_statistics(Arrays({"image": images}), "image", per=per)
    exact = images.astype(np.float64)
    assert statistics.mean["image"] == pytest.approx(exact.mean(axes), rel=1e-12)
    assert statistics.std["image"] == pytest.approx(exact.std(axes), rel=1e-12)
    normalized = Arrays({"image": images, "label": np.arange(700)}).normalize(statistics)
    batch = normalized.batch(700).read(0)
    assert batch["image"].dtype == np.float32
    assert batch["image"].astype(np.float64).mean(axes) == pytest.approx(0, abs=1e-6)
    assert batch["image"].astype(np.float64).std(axes) == pytest.approx(1, abs=1e-5)
    assert batch["label"].tolist() == [*range(700)]


def test_a_large_mean_costs_no_accuracy():
    values = 1e9 + np.random.default_rng(0).normal(size=5000)
    statistics = compute_statistics(Arrays({"x": values}), "x")
    assert statistics.std["x"] == pytest.approx(values.std(), rel=1e-6)


def test_what_does_not_vary_becomes_zero_and_sequences_are_normalized_as_a_whole():
    constant = Arrays({"x": np.full((5, 2), 7.0)})
    assert not constant.normalize(compute_statistics(constant, "x")).get(0)["x"].any()
    items = [{"x": np.arange(n, dtype=np.float32)} for n in (2, 5, 3)]
    ragged = Items(items)
    flat = np.concatenate([item["x"] for item in items])
    statistics = compute_statistics(ragged, "x")
    assert statistics.std["x"] == pytest.approx(flat.std())
    expected = (items[1]["x"] - flat.mean()) / flat.std()
    assert ragged.normalize(statistics).get(1)["x"] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ConfigurationError, match="unequal lengths"):
        compute_statistics(ragged, "x", per="element")


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.1, -7.7])
def test_equal_numbers_have_no_deviation_and_become_zero_however_many(value: float):
    constant = Arrays({"x": np.full((300, 2), value)})
    statistics = compute_statistics(constant, "x")
    assert statistics.mean["x"].tolist() == [value, value]
    assert statistics.std["x"].tolist() == [0, 0]
    assert not constant.normalize(statistics).read([0, 299])["x"].any()


@pytest.mark.parametrize("lengths", [[*range(1, 257), 5], [3] * 256 + [5], [0] * 256 + [4, 0]])
def test_statistics_of_sequences_do_not_depend_on_which_of_them_have_one_length(lengths: list[int]):
    rng = np.random.default_rng(0)
    items = [{"x": rng.normal(1, 2, size=length)} for length in lengths]
    dataset = Items(items)
    flat = np.concatenate([item["x"] for item in items])
    statistics = compute_statistics(dataset, "x")
    assert statistics.mean["x"] == pytest.approx(flat.mean(), rel=1e-12)
    assert statistics.std["x"] == pytest.approx(flat.std(), rel=1e-12)
    assert statistics.count["x"] == flat.size
    normalized = dataset.normalize(statistics).read([0, 256])["x"]
    expected = [(items[n]["x"] - flat.mean()) / flat.std() for n in (0, 256)]
    assert [*map(len, normalized)] == [lengths[0], lengths[256]]
    assert np.concatenate([*normalized]) == pytest.approx(np.concatenate(expected), abs=1e-6)
    with pytest.raises(ConfigurationError, match="per='array'|'array'"):
        compute_statistics(dataset, "x", per="element")


def test_examples_of_several_numbers_of_channels_have_no_mean_per_channel():
    dataset = Items([{"x": np.ones((2, 3))}] * 256 + [{"x": np.ones((2, 4))}])
    with pytest.raises(ConfigurationError, match=r"x have several shapes.*choose per='array'"):
        compute_statistics(dataset, "x")
    assert compute_statistics(dataset, "x", per="array").count["x"] == 256 * 6 + 8


def test_statistics_of_the_user_are_lists_or_arrays_and_must_make_sense():
    dataset = Arrays({"x": np.array([[3.0, 5.0]])})
    known = Statistics({"x": [1, 2]}, {"x": [2, 0.5]}, {"x": 9})  # type: ignore[arg-type]
    assert dataset.normalize(known).get(0)["x"].tolist() == [1, 6]
    for mean, std in (({"x": 0.0}, {}), ({"x": 0.0}, {"x": -1.0}), ({"x": np.nan}, {"x": 1.0})):
        with pytest.raises(DataError, match="Statistics: "):
            Statistics(mean, std, {"x": 1})  # type: ignore[arg-type]
    with pytest.raises(DataError, match="beyond float64"), np.errstate(over="ignore"):
        compute_statistics(Arrays({"x": np.array([1e200, -1e200])}), "x")


def test_statistics_are_saved_once_and_belong_to_their_dataset(tmp_path: Path):
    path = tmp_path / "statistics.json"
    images = Arrays({"image": make_images()})
    first = compute_statistics(images, "image", path=path)
    before = path.stat().st_mtime_ns
    loaded = compute_statistics(images, "image", path=path)
    assert path.stat().st_mtime_ns == before
    assert loaded.mean["image"].tolist() == first.mean["image"].tolist()
    assert loaded.std["image"].tolist() == first.std["image"].tolist()
    stages = [
        images.normalize(statistics).batch(2).get_identity() for statistics in (loaded, first)
    ]
    assert stages[0] == stages[1]
    with pytest.raises(DataError, match="remove it, or choose another path"):
        compute_statistics(images.take(5), "image", path=path)
    path.write_text("{}")
    with pytest.raises(DataError, match="does not hold statistics"):
        Statistics.load(path)


def test_saved_statistics_are_not_those_of_other_contents_or_functions(tmp_path: Path):
    def scale(factor: Any) -> Any:
        return lambda example: {"x": example["x"] * factor}

    path = tmp_path / "statistics.json"
    values = np.arange(20.0).reshape(10, 2)
    dataset = Arrays({"x": values}).map(scale(1))
    assert compute_statistics(dataset, "x", path=path).mean["x"].tolist() == [9, 10]
    again = Arrays({"x": values.copy()}).map(scale(1))
    assert compute_statistics(again, "x", path=path).mean["x"].tolist() == [9, 10]
    for other in (Arrays({"x": values + 1}).map(scale(1)), Arrays({"x": values}).map(scale(2))):
        with pytest.raises(DataError, match="remove it, or choose another path"):
            compute_statistics(other, "x", path=path)
    hidden = Arrays({"x": values}).map(scale(Decimal(1).__float__))
    with pytest.raises(ConfigurationError, match=r"factor in .*scale.* of map.*looked into"):
        compute_statistics(hidden, "x", path=path)


def test_what_has_no_statistics_is_refused():
    with pytest.raises(DataError, match=r"x of Arrays\(0 of .*no numbers: there are 0 examples"):
        compute_statistics(Arrays({"x": np.zeros((0, 2))}), "x")
    dataset = Arrays({"x": np.array([1.0, np.nan])})
    with pytest.raises(DataError, match="x holds a number that is not finite"):
        compute_statistics(dataset, "x")
    with pytest.raises(ConfigurationError, match="no array 'y'"):
        compute_statistics(dataset, "y")
    with pytest.raises(ConfigurationError, match="name at least one"):
        compute_statistics(dataset)
    with pytest.raises(ConfigurationError, match=r"before shuffle\(\)"):
        compute_statistics(dataset.shuffle(), "x")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([1, 1j]), "complex128"),
        (np.array(["1", "2"]), "<U1"),
        (np.array([1, 2], "datetime64[s]"), r"datetime64\[s\]"),
    ],
)
def test_what_is_no_real_number_has_no_mean(values: np.ndarray, dtype: str):
    dataset = Arrays({"x": values})
    with pytest.raises(ConfigurationError, match=f"x of Arrays.* is {dtype}, and .*real numbers"):
        compute_statistics(dataset, "x")
    statistics = compute_statistics(Arrays({"x": np.arange(2)}), "x")
    with pytest.raises(ConfigurationError, match=rf"data\['x'\] is {dtype}, and .*real numbers"):
        dataset.normalize(statistics).get(0)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "bfloat16"])
def test_real_numbers_of_every_dtype_are_normalized(dtype: str):
    values = np.array([0, 1, 1, 1]).astype(jnp.dtype(dtype))
    dataset = Arrays({"x": values})
    statistics = compute_statistics(dataset, "x")
    assert (statistics.mean["x"], statistics.std["x"]) == (0.75, np.sqrt(0.1875))
    normalized = dataset.normalize(statistics).read([0, 1])["x"]
    assert normalized.dtype == np.float32
    assert normalized == pytest.approx([-np.sqrt(3), np.sqrt(1 / 3)])


class Sum(fg.Module):
    weight: jax.Array

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(fg.metrics.Mean.from_values(self.weight * batch["x"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


def test_a_map_on_the_device_is_part_of_the_step_of_training():
    def double(batch: Any) -> Any:
        assert not isinstance(batch["x"], np.ndarray)
        return {"x": 2.0 * batch["x"]}

    def add_noise(batch: Any, key: jax.Array) -> Any:
        return {"x": batch["x"] + jax.random.uniform(key, batch["x"].shape)}

    batches = Arrays({"x": np.ones(4, np.float32)}).batch(4)
    plain = fg.Engine(steps=1, plugins=[MapOnDevice(double)]).fit(Sum(jnp.zeros(())), batches)
    assert float(plain.module.weight) == -2.0
    noisy = fg.Engine(steps=1, plugins=[MapOnDevice(add_noise, rng=True)])
    assert -2.0 < float(noisy.fit(Sum(jnp.zeros(())), batches).module.weight) < -1.0
    with pytest.raises(ConfigurationError, match="MapOnDevice: function"):
        MapOnDevice(3)  # type: ignore[arg-type]


def test_statistics_of_another_shape_are_refused_with_stage_and_array():
    statistics = compute_statistics(Arrays({"x": np.eye(3)}), "x")
    other = Arrays({"x": np.ones((4, 2))}).normalize(statistics)
    message = r"normalize\(x, .*data\['x'\] has examples of shape \(2,\).*of shape \(3,\)"
    with pytest.raises(ConfigurationError, match=message):
        other.get(0)
