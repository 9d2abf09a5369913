"""Where batches come from: arrays in memory, or any iterable of pytrees of arrays.

One pass over a source is one epoch. What can be iterated again repeats; an iterator does not. A
yielded array must never be written again, because jax may alias it: wrap a source that reuses
buffers in ``DataSource(source, copy=True)``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from fulgurite._src.data.ahead import iter_ahead
from fulgurite._src.data.batch import Batch, IndexedBatch
from fulgurite._src.data.leaves import (
    as_array,
    as_arrays,
    as_native,
    as_stored_array,
    get_native_dtype,
)
from fulgurite._src.data.seekable import Seed, SeekableSource
from fulgurite._src.tracebacks import hide_constructor_frames
from fulgurite._src.tree.specs import shape_spec
from fulgurite.errors import (
    ConfigurationError,
    DataError,
    as_int,
    check_one_of,
    check_positive_int,
    check_tuple_of,
    did_you_mean,
    set_ints,
)

ResumePromise = Literal["exact", "replay", "restart"]
"""What a run may expect of its data when it resumes, see `DataSource`."""


@runtime_checkable
class StatefulSource(Protocol):
    """A source that can continue in the middle of an epoch. Iterators of grain are such sources."""

    def get_state(self) -> Any:
        """Return the position right after the batch yielded last: numbers, strings, bytes, NumPy
        arrays, and lists and dictionaries of them."""
        ...

    def set_state(self, state: Any) -> None:
        """Go to a position: the next `iter()` continues from there."""
        ...


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class ArrayData:
    """Arrays in memory, cut into batches: an immutable source of any batch of any epoch.

    Example:
        images = np.zeros((1000, 28, 28), np.float32)
        digits = np.zeros(1000, np.int32)
        data = fg.ArrayData({"image": images, "label": digits}, 128, shuffle=True)
        batch = next(iter(data))

    Attributes:
        arrays: a pytree of arrays `(examples, ...)` of numbers or bools. They are kept in the
            dtypes that jax gives them: without x64, float64 as float32. A `np.memmap` is kept as it
            is, and converted batch by batch.
        batch_size: examples in a batch, over all processes.
        shuffle: whether each epoch is in another order.
        seed: for that order; by default the seed of the run.
        remainder: examples that do not fill a batch make a smaller one (`keep`), none (`drop`), or
            one padded with zeros (`pad`); then every batch is a `Batch` with a mask.
        on_device: keep the arrays on the device; batches are `IndexedBatch` then.
        num_examples: the length of the arrays.
    """

    arrays: Any = field(repr=False)
    batch_size: int
    _: KW_ONLY
    shuffle: bool = False
    seed: Seed | None = None
    remainder: Literal["keep", "drop", "pad"] = "keep"
    on_device: bool = False
    num_examples: int = field(init=False)

    def __post_init__(self) -> None:
        set_ints(self, "batch_size", "seed")
        check_positive_int(self.batch_size, "ArrayData: batch_size")
        check_one_of(self.remainder, ("keep", "drop", "pad"), "ArrayData: remainder")
        _get_seed_words(self.seed or 0)
        arrays = jax.tree_util.tree_map_with_path(as_stored_array, self.arrays)
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "num_examples", _common_length(self.arrays))
        if not len(self):
            raise DataError(
                f"ArrayData: {self.num_examples} examples do not fill a batch of {self.batch_size}."
            )

    def __len__(self) -> int:
        """Return the number of batches an epoch."""
        if self.remainder == "drop":
            return self.num_examples // self.batch_size
        return math.ceil(self.num_examples / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of epoch 0, with seed 0 unless this source has its own."""
        return self.iter_epoch(0, seed=0)

    def iter_epoch(
        self, number: int, *, seed: Seed, start: int = 0, process: tuple[int, int] = (0, 1)
    ) -> Iterator[Any]:
        """Yield the batches of an epoch, in an order that depends only on seed and epoch.

        Args:
            number: that of the epoch, from 0.
            seed: for the order, unless this source has its own.
            start: the first batch.
            process: index and number of the processes that share each batch; each gets an equal,
                contiguous part.
        """
        index, count = process
        num_left = self.num_examples % self.batch_size if self.remainder == "keep" else 0
        if not 0 <= index < count or self.batch_size % count or num_left % count:
            advice = "remainder='drop' or 'pad'"
            if self.batch_size % count:
                advice = f"a batch_size that divides by {count}"
            raise ConfigurationError(
                f"ArrayData: process {index} of {count} cannot have an equal part of each batch: "
                f"batch_size is {self.batch_size}, and {num_left} examples are left for a last one "
                f"(choose {advice})."
            )
        order = None
        if self.shuffle:
            words = _get_seed_words(seed if self.seed is None else self.seed)
            entropy = np.random.SeedSequence([*words, number])
            order = np.random.Generator(np.random.Philox(entropy)).permutation(self.num_examples)
        return self._iter_batches(order, start, index, count)

    def _iter_batches(
        self, order: np.ndarray | None, start: int, index: int, count: int
    ) -> Iterator[Any]:
        arrays = np.arange(self.num_examples, dtype=np.int32) if self.on_device else self.arrays
        paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(arrays)
        paths = [path for path, _ in paths_and_leaves]
        leaves = [leaf for _, leaf in paths_and_leaves]
        # To ask each batch takes 5 µs an array.
        are_native = [leaf.dtype == get_native_dtype(leaf) for leaf in leaves]
        padding = self.num_examples if self.on_device else 0
        for number in range(start, len(self)):
            first = number * self.batch_size
            size = self.batch_size
            if self.remainder != "pad":
                size = min(size, self.num_examples - first)
            num_rows = size // count
            low = first + index * num_rows
            high = low + num_rows
            rows = [
                leaf[low:high] if order is None else leaf.take(order[low:high], 0)
                for leaf in leaves
            ]
            parts = [
                _pad_to(part if is_native else as_native(path, part), num_rows, padding)
                for path, part, is_native in zip(paths, rows, are_native, strict=True)
            ]
            batch = structure.unflatten(parts)
            mask = np.arange(low, high) < self.num_examples if self.remainder == "pad" else None
            if self.on_device:
                yield IndexedBatch(batch, mask)
            elif mask is None:
                yield batch
            else:
                yield Batch(batch, mask)

    def iter_known_batches(self, process: tuple[int, int]) -> Iterator[tuple[int, Any]]:
        """Yield the last batch of an epoch with its number, if it is smaller than the others.

        Args:
            process: as of `iter_epoch`.
        """
        if self.remainder == "keep" and self.num_examples % self.batch_size:
            last = len(self) - 1
            # In order, because a permutation of all examples takes long.
            in_order = replace(self, shuffle=False)
            yield last, next(in_order.iter_epoch(0, seed=0, start=last, process=process))

    def has_unequal_batches(self) -> bool:
        """Return whether the last batch of an epoch has fewer examples than those before it."""
        is_uneven = self.num_examples % self.batch_size > 0
        return is_uneven and self.num_examples > self.batch_size and self.remainder != "drop"

    def has_padding(self) -> bool:
        """Return whether the last batch of an epoch is padded."""
        return self.remainder == "pad" and self.num_examples % self.batch_size > 0

    def count_per_batch(self) -> tuple[int, str]:
        """Return how much is in a batch, and of what, for the display of a run."""
        return min(self.batch_size, self.num_examples), "examples"

    def depends_on_epoch(self) -> bool:
        """Return whether each epoch is in another order."""
        return self.shuffle

    def get_identity(self) -> tuple[str, ...]:
        """Return nothing: a run may resume with other arrays, as long as the position exists."""
        return ()

    def device_put(
        self, sharding: Any = None, *, epoch: int | None = None, seed: Seed | None = None
    ) -> Iterator[Any]:
        """Yield the batches of an epoch on devices, for a loop of one's own.

        Example:
            data = fg.ArrayData({"x": np.ones((8, 3))}, 4, shuffle=True)
            for epoch in range(2):  # the batches of Engine(epochs=2, seed=5).fit(model, data)
                for batch in data.device_put(epoch=epoch, seed=5):
                    ...

        Args:
            sharding: see `DataSource.device_put`.
            epoch: the number of the epoch, from 0.
            seed: for the order, unless this source has its own: the seed of an engine, or `(seed,
                step)` for the batches of a fit that continues from a state of that step.

        Raises:
            ConfigurationError: the order is shuffled, and epoch or seed are missing.
        """
        return DataSource(self, prefetch=0).device_put(sharding, epoch=epoch, seed=seed)

    @cached_property
    def device_arrays(self) -> Any:
        """Return the pytree of all arrays on the default device."""
        return jax.tree_util.tree_map_with_path(
            lambda path, array: jnp.asarray(as_native(path, array)), self.arrays
        )

    @staticmethod
    def gather(device_arrays: Any, batch: Any) -> Any:
        """Return the batch that an `IndexedBatch` stands for. Pure; meant to be traced.

        Args:
            device_arrays: those of the source.
            batch: any other batch than an `IndexedBatch` is returned as it is.
        """
        if not isinstance(batch, IndexedBatch):
            return batch
        mode = "promise_in_bounds" if batch.mask is None else "fill"
        value = jax.tree.map(
            lambda array: array.at[batch.indices].get(mode=mode, fill_value=0), device_arrays
        )
        return value if batch.mask is None else Batch(value, batch.mask)


@hide_constructor_frames
@dataclass(frozen=True, eq=False)
class DataSource:
    """Any iterable of pytrees of arrays, with options.

    Example:
        batches = [{"x": np.ones((4, 2)), "y": np.ones(4)}]
        data = fg.DataSource(batches, prefetch=4)

    Attributes:
        source: the iterable.
        copy: whether to copy each array, for a source that writes to it again after yielding it.
        prefetch: the number of batches that a background thread reads ahead; 0 for no thread.
        batch_examples: a batch of each structure that the source yields, if these are several; the
            numbers in them do not matter. A batch of any other structure is an error.
        resume: what the source promises a run that resumes. `exact`: it has `get_state` and
            `set_state`, which say everything, or it is a `SeekableSource` such as `ArrayData`, a
            list or a tuple. `replay`:
            each pass over it is the same, so that batches that were seen are read again and
            skipped. `restart`: neither; it begins again with its first batch, and the run is not
            exact. None for `exact` where it is so, and no promise otherwise.
        name: what errors and the description of a run call it.
    """

    source: Any
    _: KW_ONLY
    copy: bool = False
    prefetch: int = 2
    batch_examples: tuple[Any, ...] = ()
    resume: ResumePromise | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, Mapping | np.ndarray | jax.Array):
            is_mapping = isinstance(self.source, Mapping)
            mistake = "a dictionary gives its keys" if is_mapping else "an array gives its rows"
            raise ConfigurationError(
                f"data is an iterable of batches, and {mistake}: use fg.ArrayData(arrays, "
                "batch_size), where arrays are what a step takes, such as {'x': x} or the tuple "
                "(x, y) or (x,)"
            )
        is_iterable = hasattr(self.source, "__iter__") or _is_indexed(self.source)
        if not is_iterable and not isinstance(self.source, SeekableSource):
            lacks = ""
            if hasattr(self.source, "__getitem__"):
                lacks = ": it has __getitem__, and needs __len__ as well, or __iter__"
            if hasattr(self.source, "batch"):
                lacks = ": it has examples, of which .batch(size) makes batches"
            raise ConfigurationError(
                f"data must be an iterable of batches, not {self.source!r}{lacks}."
            )
        check_tuple_of(self.batch_examples, object, "DataSource: batch_examples")
        set_ints(self, "prefetch")
        if self.prefetch < 0:
            raise ConfigurationError(
                f"DataSource: prefetch is {self.prefetch}; it must be 0 or a positive integer."
            )
        if self.resume is not None:
            check_one_of(self.resume, get_args(ResumePromise), "DataSource: resume")
        _check_promise(self.source, self.resume)

    def device_put(
        self, sharding: Any = None, *, epoch: int | None = None, seed: Seed | None = None
    ) -> Iterator[Any]:
        """Yield the batches of one pass on devices, for a loop of one's own; `fit` places batches
        by itself.

        The copy of a batch begins two batches before the loop gets it. What the loop did not get
        is not lost: see `BatchIterator`.

        Args:
            sharding: a device, a sharding, or a tree of them, as of `jax.device_put`; None for the
                default device.
            epoch: as of `ArrayData.device_put`, for a source whose batches follow from it; other
                sources know themselves what comes next.
            seed: likewise.
        """
        if isinstance(self.source, SeekableSource):
            _check_epoch(self.source, epoch, seed)
            make_iterator = partial(self.source.iter_epoch, epoch or 0, seed=seed or 0)
        elif epoch is None and seed is None:
            make_iterator = partial(iter_batches, self.source)
        else:
            raise ConfigurationError(
                f"device_put: epoch={epoch!r} and seed={seed!r} are for a source whose batches "
                "follow from them, such as fg.ArrayData, and this is a "
                f"{type(self.source).__name__}, which knows itself what comes next"
            )
        convert = partial(as_arrays, copy=self.copy)
        device_arrays = get_device_arrays(self)

        def place(batch: Any) -> Any:
            return jax.device_put(ArrayData.gather(device_arrays, batch), sharding)

        has_state = isinstance(self.source, StatefulSource)
        return iter_ahead(self.source, make_iterator, convert, place, has_state=has_state)


def as_data(source: Any) -> DataSource:
    """Return a source with its options; by default no thread for what is in memory."""
    prefetch = 0 if isinstance(source, ArrayData | list | tuple) else 2
    return source if isinstance(source, DataSource) else DataSource(source, prefetch=prefetch)


def iter_batches(source: Any) -> Iterator[Any]:
    """Return an iterator over one pass of a source as the user gave it.

    One with `__getitem__` and `__len__` is read from 0 to its length. Python's own iteration would
    continue until an `IndexError`: past the length, and not past a mistake that raises one.
    """
    if not hasattr(source, "__iter__") or _has_sequence_iter(source):
        return (source[index] for index in range(len(source)))
    return iter(source)


def get_batch_examples(data: Any) -> tuple[Any, ...]:
    """Return the batches that a source declares as examples of their structures; none where all of
    its batches have one."""
    return tuple(
        jax.tree_util.tree_map_with_path(as_array, example)
        for example in as_data(data).batch_examples
    )


def get_split(data: Any, part: str, name: str | None = None) -> Any:
    """Return a part of an object that holds several sources, or the data itself.

    Args:
        data: a source, or an object with the attributes `train`, `evaluations` and `predict`.
        part: the attribute: `train`, `evaluations` or `predict`.
        name: the evaluation, for `evaluations`.

    Raises:
        DataError: the object has no such part.
    """
    if not _holds_splits(data):
        return data
    split = getattr(data, part, None)
    if split is None:
        raise DataError(
            f"{type(data).__name__} has no {part}: give it the attribute, or pass the data itself"
        )
    if name is None:
        return split
    if name not in split:
        raise DataError(
            f"{type(data).__name__} has no evaluation {name!r}. {did_you_mean(name, split)}"
        )
    return split[name]


def get_shared_batch_spec(data: Any) -> Any:
    """Return the shapes of the first batch of a source whose batches are divided among processes;
    None for one that yields what is for its own process."""
    source = as_data(data).source
    if not isinstance(source, SeekableSource):
        return None
    return shape_spec(next(source.iter_epoch(0, seed=0)))


def has_unequal_batches(data: Any, batch: Any) -> bool:
    """Return whether it is known that some batches have fewer examples than others, or may have
    because they are padded.

    Args:
        data: a data source.
        batch: its first batch.
    """
    source = as_data(data).source
    if isinstance(source, SeekableSource):
        return source.has_unequal_batches()
    if isinstance(source, list | tuple) and source:
        first, last = (jax.tree.leaves(batch)[:1] for batch in (source[0], source[-1]))
        if [np.shape(leaf)[:1] for leaf in first] != [np.shape(leaf)[:1] for leaf in last]:
            return True
    return may_pad(data, batch)


def may_pad(data: Any, batch: Any) -> bool:
    """Return whether a batch of `data` may have padding.

    Args:
        data: a data source.
        batch: its first batch.
    """
    if not isinstance(batch, Batch | IndexedBatch) or batch.mask is None:
        return False
    source = as_data(data).source
    return not isinstance(source, SeekableSource) or source.has_padding()


def get_device_arrays(data: Any) -> Any:
    """Return the arrays that the batches of `data` are gathered from on the device, or None."""
    source = as_data(data).source
    return source.device_arrays if isinstance(source, ArrayData) and source.on_device else None


def _check_promise(source: Any, promise: ResumePromise | None) -> None:
    """Raise `ConfigurationError` if a source cannot keep what it promises."""
    kind = type(source).__name__
    is_exact = isinstance(source, SeekableSource | Sequence | StatefulSource)
    if promise == "exact" and not is_exact:
        raise ConfigurationError(
            f"DataSource: {kind} cannot be resumed exactly, because it has no get_state() and "
            "set_state(state). Give resume='replay' if each pass over it is the same, or 'restart' "
            "(not exact)"
        )
    if promise == "replay" and isinstance(source, Iterator):
        raise ConfigurationError(
            f"DataSource: {kind} cannot be replayed, because it is an iterator, which can be used "
            "up once. Pass what can be iterated again"
        )


def _is_indexed(source: Any) -> bool:
    return hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _has_sequence_iter(source: Any) -> bool:
    """Return whether a source has the `__iter__` that `Sequence` gives its subclasses."""
    return getattr(type(source), "__iter__", None) is Sequence.__iter__


def _holds_splits(data: Any) -> bool:
    """Return whether this is an object of several sources, and not a source with an attribute of
    such a name."""
    has_train = hasattr(data, "train")
    has_evaluations = hasattr(data, "evaluations")
    if has_train and has_evaluations:
        return True
    is_source = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    return (has_train or has_evaluations) and not is_source


def _check_epoch(data: SeekableSource, epoch: int | None, seed: Seed | None) -> None:
    """Raise `ConfigurationError` unless it is known in which order the batches come."""
    epoch = as_int(epoch)
    if epoch is not None and (not isinstance(epoch, int) or epoch < 0):
        raise ConfigurationError(
            f"device_put: epoch is {epoch!r}; it must be an integer that is not negative"
        )
    has_seed = seed is not None or (isinstance(data, ArrayData) and data.seed is not None)
    if data.depends_on_epoch() and (epoch is None or not has_seed):
        raise ConfigurationError(
            f"device_put: the order of this {type(data).__name__} depends on epoch and seed. "
            "Say which epoch it is: data.device_put(epoch=epoch, seed=engine.seed) gives the "
            "batches of fit. Or take them from engine.iter_batches(data, epochs=...)"
        )


def _pad_to(part: np.ndarray, length: int, value: int) -> np.ndarray:
    missing = length - len(part)
    if not missing:
        return part
    return np.concatenate([part, np.full((missing, *part.shape[1:]), value, part.dtype)])


def _common_length(arrays: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    for path, leaf in leaves:
        if not leaf.ndim:
            raise DataError(
                f"ArrayData: data{keystr(path)} is a single number; give arrays of examples, not a "
                "list of numbers."
            )
    lengths = {f"data{keystr(path)}": len(leaf) for path, leaf in leaves}
    first_name, length = next(iter(lengths.items()), ("", 0))
    for name, other in lengths.items():
        if not other:
            raise DataError(f"ArrayData: {name} has 0 examples; give arrays of at least one.")
        if other != length:
            raise DataError(
                f"ArrayData: {name} has {other} examples, {first_name} has {length}; all arrays "
                "must have the same number of them."
            )
    return length


def _get_seed_words(seed: Seed) -> tuple[int, ...]:
    words = tuple(as_int(word) for word in (seed if isinstance(seed, tuple) else (seed,)))
    if any(not isinstance(word, int) or word < 0 for word in words):
        raise ConfigurationError(
            f"the data's seed is {seed!r}; it must be ints that are not negative."
        )
    return words
