"""Looking at what is on the devices."""

import io
import re
from contextlib import redirect_stdout

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import (
    placed,
)
from fulgurite_sharding import (
    FSDP,
    DataParallel,
    ReplicaError,
    Sharding,
    check_replicas,
    gather,
    visualize_sharding,
)
from jax.sharding import NamedSharding, PartitionSpec as P


def test_replicas_that_differ_are_found() -> None:
    mesh = Sharding({"data": 4, "model": 2}).device_mesh
    numbers = np.arange(8, dtype=np.float32)

    def copies(wrong: int | None, by: float) -> jax.Array:
        sharding = NamedSharding(mesh, P("data"))
        parts = []
        for device, index in sharding.addressable_devices_indices_map((8,)).items():
            part = numbers[index].copy()
            part[-1] += by if device.id == wrong else 0
            parts.append(jax.device_put(part, device))
        return jax.make_array_from_single_device_arrays((8,), sharding, parts)

    check_replicas({"w": copies(None, 0), "key": jax.random.key(0), "nan": jnp.full(3, jnp.nan)})
    check_replicas({"w": copies(5, 1e-4)}, atol=1e-3)
    # the number that differs is 5 in the first copy.
    check_replicas({"w": copies(5, 1e-4)}, rtol=1e-4)
    with pytest.raises(ReplicaError) as caught:
        check_replicas({"w": copies(5, 1e-4)}, rtol=1e-6)
    assert "rtol 1e-06" in str(caught.value)
    with pytest.raises(ReplicaError) as caught:
        check_replicas({"w": [copies(None, 0), copies(5, 0.25)]})
    message = str(caught.value).lower().replace("cpu_5", "cpu:5")
    assert all(word in message for word in ("w[1]", "cpu:5", "0.25"))


def test_replicas_of_large_integers_that_differ_are_found() -> None:
    with jax.enable_x64(True):
        parts = [
            jax.device_put(np.array([2**60 + (device.id == 5)]), device) for device in jax.devices()
        ]
        whole = NamedSharding(DataParallel().device_mesh, P())
        with pytest.raises(ReplicaError) as caught:
            check_replicas({"n": jax.make_array_from_single_device_arrays((1,), whole, parts)})
        assert "differs from the first one by up to 1" in str(caught.value)


def test_gather_gives_the_whole() -> None:
    state = placed(FSDP(min_size=1))
    assert state.module.matrix.addressable_shards[0].data.shape == (16, 3)
    gathered = gather(
        {
            "matrix": state.module.matrix,
            "key": state.key,
            "name": "x",
            "numbers": np.arange(3),
            "one": np.float32(2),
        }
    )
    assert type(scalar := gather(np.float32(2))) is np.ndarray and scalar == 2
    assert type(gathered["matrix"]) is np.ndarray and gathered["name"] == "x"
    assert np.array_equal(gathered["matrix"], placed(Sharding()).module.matrix)
    assert np.array_equal(gathered["key"], jax.random.key_data(jax.random.key(0)))
    assert np.array_equal(gathered["numbers"], np.arange(3))


def test_show_prints_a_table() -> None:
    state = placed(FSDP(min_size=1))
    with redirect_stdout(io.StringIO()) as out:
        visualize_sharding(state.module)
        visualize_sharding(state.module, visualize="vector")
    lines = out.getvalue().splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[:4]] == [
        ["path", "shape", "spec", "bytes per device"],
        ["matrix", "[16, 24]", "P(None, 'data')", "192"],
        ["vector", "[24]", "P('data',)", "12"],
        ["total", "204"],
    ], lines[:4]
    assert "CPU 7" in out.getvalue()
