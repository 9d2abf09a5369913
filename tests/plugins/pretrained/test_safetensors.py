"""Weights come from safetensors files by path maps, and go there, bit for bit."""

import json
import struct
import warnings
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fulgurite.errors import CheckpointError, ConfigurationError, PathError
from fulgurite_pretrained import Split, load_safetensors, save_safetensors
from safetensors.numpy import load_file, save_file

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


class Block(eqx.Module):
    """A layer of the models that follow."""

    query: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, *, key: Any) -> None:
        self.query = eqx.nn.Linear(3, 2, key=key)
        self.norm = eqx.nn.LayerNorm(3)


class Net(eqx.Module):
    """Blocks in a list."""

    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, outputs: int = 4, *, key: Any) -> None:
        self.blocks = [Block(key=key) for key in jax.random.split(key, 3)]
        self.head = eqx.nn.Linear(2, outputs, key=key)


class StackedNet(eqx.Module):
    """The same blocks as one stack, for `scan`."""

    blocks: Block
    head: eqx.nn.Linear

    def __init__(self, outputs: int = 4, *, key: Any) -> None:
        self.blocks = eqx.filter_vmap(lambda key: Block(key=key))(jax.random.split(key, 3))
        self.head = eqx.nn.Linear(2, outputs, key=key)


TORCH_MAP = {
    "encoder.layer.*.attention.q.weight": "blocks[*].query.weight",
    "encoder.layer.*.attention.q.bias": "blocks[*].query.bias",
    "encoder.layer.*.ln.weight": "blocks[*].norm.weight",
    "encoder.layer.*.ln.bias": "blocks[*].norm.bias",
    "fc.weight": "head.weight",
    "fc.bias": "head.bias",
    "position_ids": None,
}


def make_torch_arrays() -> dict[str, np.ndarray]:
    """Arrays under names as PyTorch has them."""
    arrays = {"fc.weight": draw(4, 2), "fc.bias": draw(4), "position_ids": np.arange(5)}
    for number in range(3):
        start = f"encoder.layer.{number}"
        arrays |= {f"{start}.attention.q.weight": draw(2, 3), f"{start}.attention.q.bias": draw(2)}
        arrays |= {f"{start}.ln.weight": draw(3), f"{start}.ln.bias": draw(3)}
    return arrays


@pytest.fixture
def torch_file(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    arrays = make_torch_arrays()
    save_file(arrays, tmp_path / "torch.safetensors")
    return tmp_path / "torch.safetensors", arrays


def test_names_of_another_framework_fill_a_list_of_layers(
    torch_file: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, arrays = torch_file
    net = load_safetensors(path, into=Net(key=KEY), map=TORCH_MAP)
    for number, block in enumerate(net.blocks):
        start = f"encoder.layer.{number}"
        assert np.array_equal(block.query.weight, arrays[f"{start}.attention.q.weight"])
        assert np.array_equal(block.query.bias, arrays[f"{start}.attention.q.bias"])
        assert np.array_equal(block.norm.weight, arrays[f"{start}.ln.weight"])
        assert np.array_equal(block.norm.bias, arrays[f"{start}.ln.bias"])
    assert np.array_equal(net.head.weight, arrays["fc.weight"])


def test_unstacked_names_fill_blocks_that_are_one_stack_by_the_same_map(
    torch_file: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    path, arrays = torch_file
    net = load_safetensors(path, into=StackedNet, map=TORCH_MAP)
    expected = np.stack([arrays[f"encoder.layer.{n}.attention.q.weight"] for n in range(3)])
    assert np.array_equal(net.blocks.query.weight, expected)
    save_safetensors(net, tmp_path / "again.safetensors", map=TORCH_MAP)
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == arrays.keys() - {"position_ids"}
    assert all(np.array_equal(array, arrays[name]) for name, array in again.items())


def test_a_file_written_without_a_map_has_the_paths_as_its_names(tmp_path: Path) -> None:
    net = Net(key=KEY)
    save_safetensors(net, tmp_path / "net.safetensors", metadata={"author": "me"})
    arrays = load_file(tmp_path / "net.safetensors")
    assert np.array_equal(arrays["blocks[1].query.weight"], net.blocks[1].query.weight)
    other = load_safetensors(tmp_path / "net.safetensors", into=lambda key: Net(key=key))
    assert eqx.tree_equal(net, other)


def test_each_array_is_written_and_read_bit_for_bit(tmp_path: Path) -> None:
    """Safetensors 0.8 writes arrays that are not contiguous wrong, and takes no scalars."""
    square = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {
        "transposed": square.T,
        "strided": square[:, ::2],
        "backward": square[::-1],
        "fortran": np.asfortranarray(square),
        "on_device": jnp.asarray(square),
        "bfloat16": jnp.asarray(square, jnp.bfloat16),
        "scalar": np.float32(2.5) * np.ones(()),
        "device_scalar": jnp.float32(1.5),
        "empty": np.zeros((0, 3), np.float32),
        "flags": np.array([True, False]),
        "integers": np.array([1, 2], np.uint16),
        "complex": np.array([1 + 2j], np.complex64),
    }
    arrays["scalar"] = np.asarray(arrays["scalar"], np.float32)
    save_safetensors(arrays, tmp_path / "all.safetensors")
    stored = load_file(tmp_path / "all.safetensors")
    for name, array in arrays.items():
        assert stored[f"{name}"].dtype == array.dtype
        assert stored[f"{name}"].shape == array.shape
        assert stored[f"{name}"].tobytes() == np.array(array, order="C").tobytes()

    class Holder(eqx.Module):
        value: Any

    template = Holder(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
    )
    holder = load_safetensors(
        tmp_path / "all.safetensors",
        into=template,
        map={name: f"value.{name}" for name in arrays},
    )
    for name, array in arrays.items():
        assert np.asarray(holder.value[name]).tobytes() == np.array(array, order="C").tobytes()


def test_what_the_format_cannot_hold_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(
        ConfigurationError, match=r"\[\"noise\"\] is a random key|noise is a random key"
    ):
        save_safetensors({"noise": jax.random.key(0)}, path)
    with pytest.raises(ConfigurationError, match="small has the dtype int4.*cast it"):
        save_safetensors({"small": jnp.zeros(2, jnp.int4)}, path)
    with pytest.raises(ConfigurationError, match="shape, without numbers"):
        save_safetensors({"a": jax.ShapeDtypeStruct((2,), jnp.float32)}, path)
    with pytest.raises(ConfigurationError, match="must end with .safetensors"):
        save_safetensors({"a": jnp.zeros(2)}, tmp_path / "a.bin")
    with pytest.raises(ConfigurationError, match="max_shard_size is '5 potatoes'"):
        save_safetensors({"a": jnp.zeros(2)}, path, max_shard_size="5 potatoes")
    with pytest.raises(ConfigurationError, match="its values must be strings"):
        save_safetensors({"a": jnp.zeros(2)}, path, metadata={"step": 3})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="no name for b of the module"):
        save_safetensors({"a": jnp.zeros(2), "b": jnp.zeros(2)}, path, map={"x": "a"})
    assert list(tmp_path.iterdir()) == []


def test_a_matrix_is_transposed_only_where_the_map_says_so(tmp_path: Path) -> None:
    path = tmp_path / "keras.safetensors"
    kernel, bias = draw(2, 3), draw(3)
    save_file({"kernel": kernel, "bias": bias}, path)
    linear = eqx.nn.Linear(2, 3, key=KEY)
    wrong = {"kernel": "weight", "bias": "bias"}
    with pytest.raises(
        CheckpointError,
        match=r"kernel is float32\[2, 3\], and weight of the module is \[3, 2\], its transpose: end the path in the map with .T",
    ):
        load_safetensors(path, into=linear, map=wrong)
    right = {**wrong, "kernel": "weight.T"}
    assert np.array_equal(load_safetensors(path, into=linear, map=right).weight, kernel.T)
    save_safetensors(linear, tmp_path / "back.safetensors", map=right)
    assert np.array_equal(load_file(tmp_path / "back.safetensors")["kernel"], linear.weight.T)
    with pytest.raises(CheckpointError, match="bias.*is not a matrix"):
        load_safetensors(path, into=linear, map={**right, "bias": "bias.T"})


@pytest.mark.parametrize("suffix", ["", ".T"])
def test_one_array_of_a_file_is_split_into_several_and_joined_again(
    tmp_path: Path, suffix: str
) -> None:
    """As PyTorch has the three projections of attention in one matrix."""
    joined = draw(12, 4)
    path = tmp_path / "torch.safetensors"
    save_file({"in_proj": joined.T.copy() if suffix else joined, "out.weight": draw(4, 4)}, path)
    attention = eqx.nn.MultiheadAttention(2, 4, key=KEY)
    parts = [f"{part}_proj.weight{suffix}" for part in ("query", "key", "value")]
    path_map = {"in_proj": Split(*parts), "out.weight": "output_proj.weight"}
    loaded = load_safetensors(path, into=attention, map=path_map)
    assert np.array_equal(loaded.query_proj.weight, joined[:4])
    assert np.array_equal(loaded.key_proj.weight, joined[4:8])
    assert np.array_equal(loaded.value_proj.weight, joined[8:])
    save_safetensors(loaded, tmp_path / "back.safetensors", map=path_map)
    assert (tmp_path / "back.safetensors").read_bytes() == path.read_bytes()


def test_names_that_do_not_fit_are_listed_with_the_nearest(
    torch_file: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, arrays = torch_file
    arrays = {**arrays, "fc.wieght": draw(4, 2), "encoder.layer.7.ln.bias": draw(3)}
    del arrays["fc.bias"], arrays["encoder.layer.2.ln.weight"]
    arrays["encoder.layer.0.attention.q.bias"] = draw(9)
    save_file(arrays, path)
    for into in (Net, StackedNet):
        with pytest.raises(CheckpointError) as caught:
            load_safetensors(path, into=into(key=KEY), map=TORCH_MAP)
        text = str(caught.value)
        assert (
            "fc.wieght of the file, float32[4, 2], is not in the map. Did you mean 'fc.weight'?"
            in text
        )
        assert (
            "encoder.layer.7.ln.bias of the file" in text and "has no place in the module" in text
        )
        assert "head.bias of the module, float32[4], is not in the file" in text
        assert (
            "encoder.layer.0.attention.q.bias is float32[9], and blocks[*].query.bias of the module is [2]"
            in text
        )
        assert "strict=False takes what fits" in text


def test_a_number_in_a_name_is_that_of_one_layer_alone(
    torch_file: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, arrays = torch_file
    for number in ("00", "-1", "٣", "1" * 40):
        save_file({**arrays, f"encoder.layer.{number}.ln.bias": draw(3)}, path)
        with pytest.raises(
            CheckpointError, match=r"ln.bias of the file, float32\[3\], is not in the map"
        ):
            load_safetensors(path, into=StackedNet, map=TORCH_MAP)


def test_a_map_that_cannot_be_read_is_an_error(torch_file: tuple[Path, dict[str, Any]]) -> None:
    path, _ = torch_file
    faulty = {
        "no array at 'haed.weight'. Did you mean 'head.weight'": {"fc.weight": "haed.weight"},
        "has 1 of '\\*', and its path 'head.weight' 0": {"fc.*": "head.weight"},
        "an entry is a name": {"fc.weight": 3},
        "some end with .T and some do not": {"fc.weight": Split("head.weight.T", "head.bias")},
    }
    for text, path_map in faulty.items():
        with pytest.raises(ConfigurationError, match=text):
            load_safetensors(path, into=Net(key=KEY), map=path_map)
    with pytest.raises(PathError, match="cannot read the path 'head weight' of 'fc.weight'"):
        load_safetensors(path, into=Net(key=KEY), map={"fc.weight": "head weight"})
    with pytest.raises(ConfigurationError, match="map is str"):
        load_safetensors(path, into=Net(key=KEY), map="head")  # pyright: ignore[reportArgumentType]


@pytest.mark.full
def test_without_strict_what_fits_is_taken_past_another_head_and_the_rest_is_listed(
    torch_file: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, arrays = torch_file
    for into in (StackedNet(7, key=KEY), lambda key: StackedNet(7, key=key)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net = load_safetensors(path, into=into, map=TORCH_MAP, strict=False)
        text = str(caught[0].message)
        assert "4 of its 6 arrays come from it" in text
        assert "fc.weight is float32[4, 2], and head.weight of the module is [7, 2]" in text
        expected = np.stack([arrays[f"encoder.layer.{n}.ln.bias"] for n in range(3)])
        assert np.array_equal(net.blocks.norm.bias, expected)
        assert np.array_equal(net.head.weight, StackedNet(7, key=KEY).head.weight)
    with pytest.raises(CheckpointError, match="has nothing that fits"):
        load_safetensors(path, into=eqx.nn.Linear(9, 9, key=KEY), strict=False)


class Adapter(eqx.Module):
    """Arrays that mean nothing without each other."""

    is_loaded_whole: ClassVar[bool] = True

    up: jax.Array
    scale: jax.Array

    def __init__(self, rank: int, scale: float) -> None:
        self.up = jnp.full((2, rank), scale)
        self.scale = jnp.float32(scale)


def test_what_is_loaded_whole_is_so_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "adapters.safetensors"
    save_safetensors({"first": Adapter(3, 5.0), "second": Adapter(4, 6.0)}, path)

    class Pair(eqx.Module):
        first: Adapter
        second: Adapter

    pair = Pair(Adapter(3, 1.0), Adapter(8, 1.0))
    with pytest.warns(UserWarning, match="in part: 2 of its 4 arrays") as caught:
        loaded = load_safetensors(path, into=pair, strict=False)
    assert eqx.tree_equal(loaded, Pair(Adapter(3, 5.0), Adapter(8, 1.0)))
    text = str(caught[0].message)
    assert "second.up is float32[2, 4], and second.up of the module is [2, 8]" in text
    assert "second.scale of the module fits, and is left with the rest of second" in text
    with pytest.raises(CheckpointError, match="has nothing that fits"):
        load_safetensors(path, into=Pair(Adapter(9, 1.0), Adapter(8, 1.0)), strict=False)


def test_an_array_that_is_missing_is_named_as_the_file_should_have_it(
    torch_file: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, arrays = torch_file
    arrays = {**arrays, "fc.bais": arrays["fc.bias"]}
    removed = ["fc.bias", "encoder.layer.1.attention.q.weight"]
    removed += [f"encoder.layer.{number}.ln.weight" for number in range(3)]
    for name in removed:
        del arrays[name]
    save_file(arrays, path)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(path, into=StackedNet(key=KEY), map=TORCH_MAP)
    text = str(caught.value)
    assert (
        "head.bias of the module, float32[4], is not in the file, where its name is fc.bias; it "
        "has fc.bais" in text
    )
    assert (
        "blocks.norm.weight of the module, float32[3, 3], is not in the file, where its name is "
        "encoder.layer.*.ln.weight\n" in text
    )
    assert (
        "has 3 layers, and the file 2 that fit; there is no encoder.layer.1.attention.q.weight"
        in text
    )
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(path, into=Net(key=KEY), map=TORCH_MAP)
    assert (
        "blocks[1].query.weight of the module, float32[2, 3], is not in the file, where its name "
        "is encoder.layer.1.attention.q.weight" in str(caught.value)
    )


def test_another_dtype_is_refused_unless_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    weight = draw(3, 2).astype(ml_dtypes.bfloat16)
    save_file({"weight": weight, "bias": draw(3).astype(ml_dtypes.bfloat16)}, path)
    linear = eqx.nn.Linear(2, 3, key=KEY)
    with pytest.raises(
        CheckpointError,
        match="the file has bfloat16 and the module float32; dtype='match' casts it",
    ):
        load_safetensors(path, into=linear)
    matched = load_safetensors(path, into=linear, dtype="match")
    assert matched.weight.dtype == jnp.float32
    assert np.array_equal(matched.weight, weight.astype(np.float32))
    stored = load_safetensors(path, into=linear, dtype="file")
    assert stored.weight.dtype == jnp.bfloat16 and np.array_equal(stored.weight, weight)
    save_file({"weight": np.full((3, 2), 1e6, np.float32), "bias": draw(3)}, path)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), linear)
    with pytest.raises(
        CheckpointError, match="6 numbers of weight in .* are too large for float16"
    ):
        load_safetensors(path, into=half, dtype="match")
    kinds = (np.int32, np.uint8, np.bool_, np.complex64)
    for stored_dtype in kinds:
        save_file({"weight": np.ones((3, 2), stored_dtype), "bias": draw(3)}, path)
        name = np.dtype(stored_dtype).name
        for option in (None, "match", "file"):
            text = f"the file has {name} and the module float32, and one is never cast"
            with pytest.raises(CheckpointError, match=text):
                load_safetensors(path, into=linear, dtype=option)
    save_file({"weight": np.full((3, 2), 0.1), "bias": draw(3)}, path)
    with pytest.raises(CheckpointError, match="float64 and the module float32; dtype='match'"):
        load_safetensors(path, into=linear)
    with pytest.raises(CheckpointError, match="the file has float64, which needs jax.config"):
        load_safetensors(path, into=linear, dtype="file")
    matched = load_safetensors(path, into=linear, dtype="match")
    assert np.array_equal(matched.weight, np.full((3, 2), 0.1, np.float32))


class Keyed(eqx.Module):
    """Has a random key, which no file holds."""

    weight: jax.Array
    key: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.weight = jnp.ones(3)
        self.key = jax.random.key(7)


def test_a_random_key_is_that_of_a_new_module_where_only_its_class_is_given(tmp_path: Path) -> None:
    path = tmp_path / "keyed.safetensors"
    save_file({"weight": np.arange(3, dtype=np.float32)}, path)
    keyed = load_safetensors(path, into=Keyed)
    assert np.array_equal(keyed.weight, np.arange(3))
    assert np.array_equal(jax.random.key_data(keyed.key), jax.random.key_data(jax.random.key(7)))


def test_numbers_of_64_bits_are_never_cut_where_jax_has_none(tmp_path: Path) -> None:
    path = tmp_path / "wide.safetensors"
    save_file({"weight": np.full((3, 2), 0.1), "bias": np.ones(3)}, path)
    wide: Any = eqx.tree_at(
        lambda linear: [linear.weight, linear.bias],
        eqx.nn.Linear(2, 3, key=KEY),
        [np.zeros((3, 2)), np.zeros(3)],
    )
    for dtype in (None, "match"):
        with pytest.raises(CheckpointError, match="the module has float64, which needs jax.config"):
            load_safetensors(path, into=wide, dtype=dtype)


def test_two_names_of_one_array_must_hold_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tied.safetensors"
    embedding = draw(5, 3)
    path_map = {"embed.weight": "weight", "lm_head.weight": "weight"}
    module = eqx.nn.Embedding(5, 3, key=KEY)
    for arrays in (
        {"embed.weight": embedding},
        {"lm_head.weight": embedding},
        dict.fromkeys(path_map, embedding),
    ):
        save_file(arrays, path)
        assert np.array_equal(load_safetensors(path, into=module, map=path_map).weight, embedding)
    save_file({"embed.weight": embedding, "lm_head.weight": embedding + 1}, path)
    with pytest.raises(
        CheckpointError,
        match="embed.weight and lm_head.weight are one array of the module, and they differ",
    ):
        load_safetensors(path, into=module, map=path_map)
    save_safetensors(module, path, map=path_map)
    assert list(load_file(path)) == ["embed.weight"]


def test_the_transpose_and_a_part_of_another_array_are_copies_too(tmp_path: Path) -> None:
    path = tmp_path / "copies.safetensors"
    weight, bias = draw(3, 2), draw(3)
    linear = eqx.nn.Linear(2, 3, key=KEY)
    path_map = {"weight": "weight", "kernel": "weight.T", "bias": "bias"}
    save_file({"weight": weight, "kernel": np.ascontiguousarray(weight.T), "bias": bias}, path)
    loaded = load_safetensors(path, into=linear, map=path_map)
    assert np.array_equal(loaded.weight, weight)
    attention = eqx.nn.MultiheadAttention(2, 4, key=KEY)
    parts = ("query_proj.weight", "key_proj.weight", "value_proj.weight")
    path_map = {"query": parts[0], "in_proj": Split(*parts), "out": "output_proj.weight"}
    save_safetensors(attention, path, map=path_map)
    arrays = load_file(path)
    # None is lost because a part of it has another name as well.
    expected = [attention.query_proj, attention.key_proj, attention.value_proj]
    assert np.array_equal(arrays["in_proj"], np.concatenate([part.weight for part in expected]))
    assert np.array_equal(arrays["query"], attention.query_proj.weight)
    other = eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(1))
    read = load_safetensors(path, into=other, map=path_map)
    assert eqx.tree_equal(read, attention)
    save_file({**arrays, "query": arrays["query"] + 1}, path)
    with pytest.raises(CheckpointError, match="are one array of the module, and they differ"):
        load_safetensors(path, into=other, map=path_map)


# --- shards ---------------------------------------------------------------------------------------


def test_shards_are_written_with_an_index_and_read_by_it(tmp_path: Path) -> None:
    net = Net(key=KEY)
    save_safetensors(net, tmp_path / "model.safetensors", max_shard_size=60)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(net, eqx.is_array)))
    assert index["metadata"]["total_size"] == total
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert eqx.tree_equal(load_safetensors(source, into=Net(key=jax.random.key(1))), net)


def test_what_was_written_last_is_read_however_it_is_divided(tmp_path: Path) -> None:
    """And nothing else in the folder is touched."""
    path = tmp_path / "new" / "model.safetensors"
    others = ["model_ema.safetensors", "model-1.safetensors", "model-00001-of-00002.txt"]
    path.parent.mkdir()
    for name in others:
        (path.parent / name).write_bytes(b"")
    sizes: tuple[Any, ...] = (60, None, np.int64(60), 200, None)
    for seed, size in enumerate(sizes):
        net = Net(key=jax.random.key(seed))
        save_safetensors(net, path, max_shard_size=size)
        for source in (path, path.parent):
            assert eqx.tree_equal(load_safetensors(source, into=Net(key=KEY)), net)
    names = {item.name for item in path.parent.iterdir()}
    assert names == {"model.safetensors", *others}


def test_a_file_can_be_read_by_whoever_can_read_others_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    save_safetensors(Net(key=KEY), tmp_path / "sub" / "one.safetensors")
    save_safetensors(Net(key=KEY), tmp_path / "sub" / "two.safetensors", max_shard_size=60)
    modes = {item.stat().st_mode for item in (tmp_path / "sub").iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode}


def test_a_home_and_variables_in_a_path_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    net = Net(key=KEY)
    save_safetensors(net, "~/net.safetensors")
    assert [item.name for item in tmp_path.iterdir()] == ["home"]
    for path in (Path("~/net.safetensors"), "$HOME/net.safetensors"):
        assert eqx.tree_equal(load_safetensors(path, into=Net(key=jax.random.key(1))), net)
    for path in ("~no-such-user/net.safetensors", "$NO_SUCH_VARIABLE/net.safetensors"):
        with pytest.raises(ConfigurationError, match="there is no such user or variable"):
            save_safetensors(net, path)


def test_an_index_reads_no_file_but_those_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    save_file({"weight": draw(2, 2)}, tmp_path / "secret.safetensors")
    save_file({"weight": draw(2, 2)}, folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    outside = str(tmp_path / "secret.safetensors")
    faulty = {
        "../secret.safetensors": "a shard is a file beside it",
        outside: "a shard is a file beside it",
        "..\\secret.safetensors": "a shard is a file beside it",
        "a\0.safetensors": "a shard is a file beside it",
        "..": "shards are",
        "config.json": "shards are",
        "b.safetensors": "names the file b.safetensors, which is not beside it",
    }
    for name, text in faulty.items():
        index.write_text(json.dumps({"weight_map": {"weight": name}}))
        with pytest.raises(CheckpointError, match=text):
            load_safetensors(folder, into=eqx.nn.Linear(2, 2, use_bias=False, key=KEY))
    for value, text in (
        ({"weight_map": {"weight": 3}}, "a shard is a file beside it"),
        (
            {"weight_map": {"other": "a.safetensors"}},
            "which model.safetensors.index.json does not say of it",
        ),
        ({"weight_map": {"weight": "a.safetensors", "b": "a.safetensors"}}, "and it has not"),
        ({"weight_map": []}, "no weight_map"),
        ([], "holds list"),
    ):
        index.write_text(json.dumps(value))
        with pytest.raises(CheckpointError, match=text):
            load_safetensors(folder, into=eqx.nn.Linear(2, 2, use_bias=False, key=KEY))
    index.write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_safetensors(folder, into=eqx.nn.Linear(2, 2, use_bias=False, key=KEY))


# --- files that lie -------------------------------------------------------------------------------


def make_file(header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def describe(shape: Any, end: int, dtype: str = "F32", start: int = 0) -> dict[str, Any]:
    return {"weight": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}


HOSTILE = {
    "nothing": b"",
    "a length alone": struct.pack("<Q", 2**63),
    "a longer header": make_file(describe([2, 2], 16), length=10_000),
    "a header of terabytes": make_file(describe([2, 2], 16), length=2**42),
    "more data than there is": make_file(describe([2, 2], 16), b"\0" * 8),
    "less data than there is": make_file(describe([2, 2], 16), b"\0" * 32),
    "a shape of more": make_file(describe([2**40, 2**40], 16)),
    "a shape that overflows": make_file(describe([2**63, 2], 16)),
    "a negative shape": make_file(describe([-2, -2], 16)),
    "offsets backward": make_file(describe([2, 2], 0, start=16)),
    "an unknown dtype": make_file(describe([2, 2], 16, "PICKLE")),
    "nested lists": make_file(b"[" * 100_000),
    "nested objects": make_file(b'{"a":' * 100_000),
    "a list": make_file([1, 2]),
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.",
    "another shape": make_file(describe([4], 16)),
    "a million axes": make_file(describe([1] * 100_000 + [4], 16)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(path, into=eqx.nn.Linear(2, 2, use_bias=False, key=KEY))
    assert len(str(caught.value)) < 1_000


def test_names_in_a_file_reach_no_terminal_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"\x1b[2J\x1b]0;owned\x07": draw(2, 2)}, path)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(path, into=eqx.nn.Linear(2, 2, use_bias=False, key=KEY))
    assert "\x1b" not in str(caught.value) and "\x07" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_a_pickle_is_never_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pytorch_model{suffix}"
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    for source in (path, tmp_path):
        with pytest.raises(CheckpointError, match="may hold a pickle, which can run any program"):
            load_safetensors(source, into=eqx.nn.Linear(2, 2, key=KEY))


def test_a_path_that_leads_nowhere_is_an_error_that_says_so(tmp_path: Path) -> None:
    linear = eqx.nn.Linear(2, 2, key=KEY)
    with pytest.raises(
        CheckpointError, match="there is no file .*nothing.safetensors: check the path"
    ):
        load_safetensors(tmp_path / "nothing.safetensors", into=linear)
    with pytest.raises(CheckpointError, match="there is no model.safetensors and no"):
        load_safetensors(tmp_path, into=linear)
    (tmp_path / "weights.npz").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is neither"):
        load_safetensors(tmp_path / "weights.npz", into=linear)


@pytest.mark.full
def test_no_edited_byte_of_a_header_reads_more_than_is_there(tmp_path: Path) -> None:
    """1,000 files with bytes changed: each is refused, or gives arrays of the module's shapes."""
    path = tmp_path / "model.safetensors"
    linear = eqx.nn.Linear(3, 2, key=KEY)
    save_safetensors(linear, path)
    whole = path.read_bytes()
    size = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(1_000):
        edited = bytearray(whole)
        for place in rng.integers(0, size, rng.integers(1, 4)):
            edited[place] = rng.integers(0, 256)
        path.write_bytes(bytes(edited))
        try:
            loaded = load_safetensors(path, into=linear)
        except CheckpointError:
            refused += 1
        else:
            assert jax.tree.map(jnp.shape, loaded) == jax.tree.map(jnp.shape, linear)
    assert refused > 900
