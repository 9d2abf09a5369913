"""Functions over the devices, outside of training."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from eight_devices import engine, some
from fulgurite.errors import ConfigurationError, DataError
from fulgurite_sharding import (
    DataParallel,
    parallel,
)


def test_parallel_takes_an_uneven_number_of_examples() -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)

    def project(batch: dict[str, Any], weight: Any) -> Any:
        assert batch["x"].shape[0] == 16  # 11 examples and 5 copies of the last, for 8 devices
        return {"y": batch["x"] @ weight, "n": batch["n"]}

    run = parallel(project, engine(DataParallel()).sharding.mesh, in_axes=(0, None))
    x = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
    result = run({"x": x, "n": np.arange(11)}, matrix)
    assert np.allclose(result["y"], x @ matrix, atol=1e-6)
    assert result["n"].tolist() == list(range(11))
    whole = parallel(lambda x: x * 2, engine(DataParallel()).sharding.mesh, in_axes=1, out_axes=1)
    doubled = whole(np.ones((2, 16)))
    assert len(doubled.sharding.device_set) == 8 and doubled.addressable_shards[0].data.shape == (
        2,
        2,
    )
    assert parallel(lambda x: x + 1, None)(np.zeros(3)).tolist() == [1, 1, 1]
    for call, says in [
        (lambda: parallel(project, some(8), mesh_axes=("model",)), "no axis 'model'; it has data"),
        (lambda: run({"x": x, "n": np.arange(3)}, matrix), r"\[3, 11\] examples"),
    ]:
        with pytest.raises((ConfigurationError, DataError)) as caught:
            call()
        assert re.search(says, str(caught.value))


def test_parallel_functions_call_collectives_and_take_arguments_by_name() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(16, 3)).astype(np.float32)
    weight = rng.normal(size=(3,)).astype(np.float32)
    mesh = engine(DataParallel()).sharding.mesh

    def center(x: Any, weight: Any, shift: Any = 0.0) -> Any:
        assert x.shape == (2, 3)  # of one device
        return x * weight - jax.lax.pmean(x.mean(0), "devices") + shift

    run = parallel(center, mesh, in_axes={"weight": None, "shift": None}, axis_name="devices")
    expected = x * weight - x.mean(0)
    assert np.allclose(run(x, weight), expected, atol=1e-6)
    assert np.allclose(run(weight=weight, shift=np.float32(2), x=x), expected + 2, atol=1e-6)

    def total(x: Any) -> Any:
        return jax.lax.psum(x.sum(0), "devices")

    options: Any = {"out_axes": None, "axis_name": "devices"}
    assert np.allclose(parallel(total, mesh, **options)(x), x.sum(0), atol=1e-5)
    assert np.allclose(parallel(total, None, **options)(x[:5]), x[:5].sum(0), atol=1e-5)
    two_axes = jax.make_mesh((2, 4), ("model", "data"))
    assert np.allclose(parallel(total, two_axes, **options)(x), x.sum(0), atol=1e-5)
    by_name = parallel(lambda x, y: x + y.T, mesh, in_axes={"y": 1})
    assert np.allclose(by_name(x[:11], y=x[:11].T), 2 * x[:11])  # uneven, as without collectives
    for call, says in [
        (lambda: parallel(total, mesh, **options)(x[:11]), "11 examples do not divide by 8"),
        (lambda: parallel(total, mesh, out_axes=None), "give axis_name= as well"),
        (lambda: parallel(total, mesh, in_axes={"y": 0}), "names 'y', and .* has no such"),
        (lambda: parallel(center, mesh, in_axes=(0, None))(x, weight=weight), "2 axes for 1 pos"),
        (lambda: parallel(total, two_axes, out_axes=None, axis_name="model"), "another axis"),
    ]:
        with pytest.raises((ConfigurationError, DataError)) as caught:
            call()
        assert re.search(says, str(caught.value))


def test_axes_of_examples_may_count_from_the_end() -> None:
    """Each array of a tree has its last axis, whatever its number. With collectives the first axis
    was divided, without a word."""
    rng = np.random.default_rng(2)
    mesh = engine(DataParallel()).sharding.mesh
    tree = {"matrix": rng.normal(size=(8, 16)), "cube": rng.normal(size=(2, 8, 16))}
    tree = {name: array.astype(np.float32) for name, array in tree.items()}
    options: Any = {"in_axes": -1, "axis_name": "devices"}

    def total(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf.sum(-1), "devices"), tree)

    totals = parallel(total, mesh, out_axes=None, **options)(tree)
    doubled = parallel(
        lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree), mesh, out_axes=-1, **options
    )(tree)
    for name, array in tree.items():
        np.testing.assert_allclose(totals[name], array.sum(-1), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(doubled[name], 2 * array)
    uneven = parallel(lambda x: x.T, mesh, in_axes=-1)
    np.testing.assert_array_equal(uneven(tree["matrix"][:, :13]), tree["matrix"][:, :13].T)


def test_parameters_that_take_several_arguments_are_divided_alike() -> None:
    rng = np.random.default_rng(3)
    parts = [rng.normal(size=(3, 11)).astype(np.float32) for _ in range(2)]
    mesh = engine(DataParallel()).sharding.mesh
    add = parallel(
        lambda *parts, scale: sum(parts) * scale,
        mesh,
        in_axes={"parts": 1, "scale": None},
        out_axes=1,
    )
    np.testing.assert_allclose(add(*parts, scale=2.0), 2 * (parts[0] + parts[1]), rtol=1e-6)


def test_an_array_without_an_axis_of_examples_is_an_error() -> None:
    mesh = engine(DataParallel()).sharding.mesh
    x = np.zeros((3, 2), np.float32)
    with pytest.raises(DataError, match=r"the arguments have an array of shape \[\], .* axis 0"):
        parallel(lambda x, scale: x * scale, mesh)(x, 2.0)
    with pytest.raises(DataError, match=r"the result has an array of shape \[\], .* axis 0"):
        parallel(lambda x: x.sum(), mesh)(x)
