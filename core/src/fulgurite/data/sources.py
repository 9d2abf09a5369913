"""Where batches come from: arrays in memory, or any iterable of pytrees of arrays.

One pass over a source is one epoch. What can be iterated again repeats; an iterator does not. A
yielded array must never be written again, because jax may alias it: wrap a source that reuses
buffers in ``DataSource(source, copy=True)``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from fulgurite.errors import ConfigurationError, DataError, did_you_mean

Seed = int | tuple[int, ...]


# No array types on the fields of these two: jax also builds them around placeholders.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class MaskedBatch:
    """A batch with padding: a pytree of arrays `(batch, ...)`, and a bool mask `(batch,)` that is
    False for padding."""

    batch: Any
    mask: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Indexed:
    """A batch for `ArrayData.gather`: the examples, int32 `(batch,)`, and the mask of a source that
    pads, or None. The index of padding is the number of examples, which is out of bounds."""

    indices: Any
    mask: Any


@runtime_checkable
class Stateful(Protocol):
    """A source that can go on in the middle of an epoch. `state` is a JSON value for the place
    right after the batch yielded last; after `restore`, the next `iter()` goes on from there."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


@dataclass(frozen=True, eq=False)
class ArrayData:
    """Arrays `(examples, ...)` of numbers or bools in memory, cut into batches of `batch_size` over
    all processes: an immutable source that can produce any batch of any epoch.

    Arrays are kept in the dtypes that jax gives them: without x64, float64 as float32. `shuffle`
    reorders each epoch, by `seed` or else by that of `epoch`. Examples that do not fill a batch
    make a smaller one (keep), none (drop), or one padded with zeros (pad), and then every batch is
    `MaskedBatch`. With `on_device` batches are `Indexed`."""

    arrays: Any = field(repr=False)
    batch_size: int
    _: KW_ONLY
    shuffle: bool = False
    seed: Seed | None = None
    remainder: Literal["keep", "drop", "pad"] = "keep"
    on_device: bool = False
    num_examples: int = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ConfigurationError(
                f"ArrayData: batch_size is {self.batch_size!r}; it must be a positive integer."
            )
        if self.remainder not in ("keep", "drop", "pad"):
            raise ConfigurationError(
                f"ArrayData: remainder is {self.remainder!r}; choose 'keep', 'drop' or 'pad'."
            )
        _seed_words(self.seed or 0)
        object.__setattr__(
            self, "arrays", jax.tree_util.tree_map_with_path(_as_stored_array, self.arrays)
        )
        object.__setattr__(self, "num_examples", _common_length(self.arrays))
        if not len(self):
            raise DataError(
                f"ArrayData: {self.num_examples} examples make no batch of {self.batch_size}."
            )

    def __len__(self) -> int:
        """Batches an epoch."""
        full, rest = divmod(self.num_examples, self.batch_size)
        return full + (rest > 0 and self.remainder != "drop")

    def __iter__(self) -> Iterator[Any]:
        """Epoch 0, with seed 0 unless this source has its own."""
        return self.iter_epoch(0, seed=0)

    def iter_epoch(
        self, number: int, *, seed: Seed, start: int = 0, process: tuple[int, int] = (0, 1)
    ) -> Iterator[Any]:
        """The batches of epoch `number` from batch `start` on, in an order that depends only on
        seed and epoch.
        `process`: index and number of the processes that share each batch; each gets an equal,
            contiguous part."""
        index, count = process
        rest = self.num_examples % self.batch_size if self.remainder == "keep" else 0
        if not 0 <= index < count or self.batch_size % count or rest % count:
            why = f"batch_size is {self.batch_size}, and {rest} examples are left for a last one"
            what = f"ArrayData: process {index} of {count} cannot have an equal part of each batch: {why}"
            raise ConfigurationError(f"{what} (choose remainder='drop' or 'pad').")
        order = None
        if self.shuffle:
            entropy = np.random.SeedSequence(
                [*_seed_words(seed if self.seed is None else self.seed), number]
            )
            order = np.random.Generator(np.random.Philox(entropy)).permutation(self.num_examples)
        return self._batches(order, start, index, count)

    def _batches(
        self, order: np.ndarray | None, start: int, index: int, count: int
    ) -> Iterator[Any]:
        arrays = np.arange(self.num_examples, dtype=np.int32) if self.on_device else self.arrays
        leaves, structure = jax.tree.flatten(arrays)
        padding = self.num_examples if self.on_device else 0
        for number in range(start, len(self)):
            left = self.num_examples - number * self.batch_size
            share = (
                self.batch_size if self.remainder == "pad" else min(self.batch_size, left)
            ) // count
            low = number * self.batch_size + index * share
            high = low + share
            parts = [
                leaf[low:high] if order is None else leaf.take(order[low:high], 0)
                for leaf in leaves
            ]
            batch = structure.unflatten([_pad_to(part, share, padding) for part in parts])
            mask = np.arange(low, high) < self.num_examples if self.remainder == "pad" else None
            if self.on_device:
                yield Indexed(batch, mask)
            else:
                yield batch if mask is None else MaskedBatch(batch, mask)

    @cached_property
    def device_arrays(self) -> Any:
        """The pytree of all arrays on the default device."""
        return jax.tree.map(jnp.asarray, self.arrays)

    @staticmethod
    def gather(resident: Any, batch: Any) -> Any:
        """The batch that an `Indexed` one stands for; any other batch unchanged. Pure; meant to be
        traced."""
        if not isinstance(batch, Indexed):
            return batch
        mode = "promise_in_bounds" if batch.mask is None else "fill"
        value = jax.tree.map(
            lambda array: array.at[batch.indices].get(mode=mode, fill_value=0), resident
        )
        return value if batch.mask is None else MaskedBatch(value, batch.mask)


@dataclass(frozen=True, eq=False)
class DataSource:
    """Any iterable of pytrees of arrays, with options: `copy` each array, for a source that writes
    to it again after yielding it; `prefetch` this many batches in a background thread, or 0 for no
    thread."""

    source: Any
    _: KW_ONLY
    copy: bool = False
    prefetch: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.source, Mapping | np.ndarray | jax.Array):
            gives = (
                "a dictionary gives its keys"
                if isinstance(self.source, Mapping)
                else "an array gives its rows"
            )
            raise ConfigurationError(
                f"data is an iterable of batches, and {gives}; use fg.ArrayData(arrays, size)"
            )
        if not hasattr(self.source, "__iter__") and not hasattr(self.source, "__getitem__"):
            raise ConfigurationError(f"data must be an iterable of batches, not {self.source!r}.")
        if self.prefetch < 0:
            raise ConfigurationError(
                f"Data: prefetch is {self.prefetch}; it must be 0 or a positive integer."
            )


def as_data(source: Any) -> DataSource:
    """`source`, with the default options if it has none: no thread for what is in memory."""
    prefetch = 0 if isinstance(source, ArrayData | list | tuple) else 2
    return source if isinstance(source, DataSource) else DataSource(source, prefetch=prefetch)


def get_split(data: Any, part: str, name: str | None = None) -> Any:
    """`data` itself, or a part of an object that holds several sources: `train`,
    `evaluations[name]`, `predict`."""
    parts = [hasattr(data, one) for one in ("train", "evaluations")]
    if not any(parts) or (
        not all(parts) and (hasattr(data, "__iter__") or hasattr(data, "__getitem__"))
    ):
        return data
    if (found := getattr(data, part, None)) is None:
        raise DataError(
            f"{type(data).__name__} has no {part}: give it the attribute, or pass the data itself"
        )
    if name is not None and name not in found:
        raise DataError(
            f"{type(data).__name__} has no evaluation {name!r}. {did_you_mean(name, found)}"
        )
    return found if name is None else found[name]


def get_device_arrays(data: Any) -> Any:
    """The arrays that the batches of `data` are gathered from on the device, or None."""
    source = as_data(data).source
    return source.device_arrays if isinstance(source, ArrayData) and source.on_device else None


def as_array(path: tuple[Any, ...], leaf: Any) -> np.ndarray | jax.Array:
    """`leaf` as an array: jax arrays as they are, all else by NumPy; a `DataError` if it does not
    hold numbers."""
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    # bfloat16 and its like are of kind V to NumPy, as are records, which jax does not know
    if array.dtype.kind in "biufc" or (
        array.dtype.kind == "V" and jnp.issubdtype(array.dtype, np.number)
    ):
        return array
    what = f"data{keystr(path)} is a {type(leaf).__name__} of dtype {array.dtype}"
    raise DataError(f"{what}, but batches hold arrays of numbers or bools: encode it first.")


def _as_stored_array(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
    array = np.asarray(as_array(path, leaf))
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _pad_to(part: np.ndarray, length: int, value: int) -> np.ndarray:
    missing = length - len(part)
    return (
        np.concatenate([part, np.full((missing, *part.shape[1:]), value, part.dtype)])
        if missing
        else part
    )


def _common_length(arrays: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    if single := [f"data{keystr(path)}" for path, leaf in leaves if not leaf.ndim]:
        raise DataError(
            f"ArrayData: {single[0]} is a single number; give arrays of examples, not a list of numbers."
        )
    lengths = {f"data{keystr(path)}": len(leaf) for path, leaf in leaves}
    first, length = next(iter(lengths.items()), ("", 0))
    for where, other in lengths.items():
        if other != length or not other:
            counts = f"{where} has {other} examples, {first} has {length}"
            raise DataError(
                f"ArrayData: {counts}; all arrays must have the same number of them, and at least 1."
            )
    return length


def _seed_words(seed: Seed) -> tuple[int, ...]:
    words = seed if isinstance(seed, tuple) else (seed,)
    if any(not isinstance(word, int) or word < 0 for word in words):
        raise ConfigurationError(
            f"the data's seed is {seed!r}; it must be ints that are not negative."
        )
    return words
