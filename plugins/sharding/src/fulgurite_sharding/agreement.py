"""What several processes do alike: fits that begin with the same, and evaluations with as many
batches on each."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
from fulgurite.errors import ConfigurationError, DataError, ProcessError


def assert_equal_across_processes(sync: fg.ProcessSync, name: str, facts: dict[str, Any]) -> None:
    """Raise `ConfigurationError`, on every process alike, if they differ in a fact that several of
    them state: each would train something else, or wait for what the others never do.

    Args:
        sync: how they agree.
        name: of the comparison.
        facts: of this process, JSON values.
    """
    first_values: dict[str, tuple[int, Any]] = {}
    for process, answer in enumerate(sync.all_gather(name, facts)):
        for what, value in answer.items():
            first, first_value = first_values.setdefault(what, (process, value))
            if value != first_value:
                raise ConfigurationError(
                    f"the processes of one training differ in {what}: {first_value} on process "
                    f"{first}, and {value} on process {process}. Each must run the same program "
                    "with the same settings, seed and model, and equally many batches of one size"
                )


def iter_aligned_batches(batches: Iterator[Any], sync: fg.ProcessSync) -> Iterator[Any]:
    """Yield the batches of an evaluation, equally many on each process.

    A process whose data has ended takes part with batches that are empty: of the size of the
    others, and masked. One whose batch is smaller is filled up likewise. Where all batches are of
    one size, nothing is masked.

    Args:
        batches: of this process.
        sync: how the processes agree.

    Raises:
        DataError: on every process alike, for batches of several structures or without an example
            axis.
        ProcessError: another process failed.
    """
    index = 0
    last = None
    while True:
        batch = None
        failure = None
        info: dict[str, Any] = {"size": 0}
        try:
            # What data computes by JAX is this process's own, and not on the mesh of all.
            with jax.set_mesh(None):
                batch = next(batches, None)
            if batch is not None:
                info = _describe_batch(batch)
        except Exception as error:
            failure = error
        infos = _gather_batch_infos(sync, f"batch {index} of an evaluation", info, failure)
        size, is_masked = _get_common_size(infos)
        if not size:
            return
        if is_masked and any(info.get("counts") for info in infos):
            raise DataError(
                f"batch {index} of an evaluation says num_examples, and is smaller on some "
                "processes or not there: what fills it up needs a mask, by which it would count. "
                "Give each process as many batches of one size, or a mask instead"
            )
        with jax.set_mesh(None):
            last = batch if batch is not None else _make_empty(last)
            padded = _pad_batch(last, size) if is_masked else last
        yield padded
        index += 1


def raise_on_any_process(sync: fg.ProcessSync, failure: Exception | None) -> None:
    """End an evaluation that may do anything: one that has failed on one process fails on all.

    Args:
        sync: how the processes agree.
        failure: of this process, or None.
    """
    _gather_batch_infos(sync, "an evaluation", {"size": 0}, failure)


def _describe_batch(batch: Any) -> dict[str, Any]:
    batch, mask = _split_mask(batch)
    leaves, structure = jax.tree.flatten(_drop_count(batch))
    lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        shapes = [list(leaf.shape) for leaf in leaves]
        raise DataError(
            f"all arrays of a batch must begin with the same example axis, and these are {shapes}"
        )
    spec = [f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in leaves]
    return {
        "size": lengths.pop(),
        "masked": mask is not None,
        # With a mask it counts by that.
        "counts": mask is None and isinstance(batch, fg.Batch) and batch.num_examples is not None,
        "spec": f"{spec} in {structure}",
    }


def _gather_batch_infos(
    sync: fg.ProcessSync, what: str, info: dict[str, Any], failure: Exception | None
) -> list[dict[str, Any]]:
    """Return what each process says of its batch; a failure of one is an error on all of them."""
    if failure is not None:
        info = {"error": f"{type(failure).__name__}: {failure}"}
    infos = sync.all_gather("evaluation", info)
    if failure is not None:
        raise failure
    for process, answer in enumerate(infos):
        if "error" in answer:
            raise ProcessError(f"process {process} failed to make {what}: {answer['error']}")
    specs = {answer["spec"]: process for process, answer in enumerate(infos) if "spec" in answer}
    if len(specs) > 1:
        (spec, process), (other_spec, other_process), *_ = specs.items()
        raise DataError(
            f"{what} is {spec} on process {process}, and {other_spec} on process {other_process}"
        )
    return infos


def _get_common_size(infos: list[dict[str, Any]]) -> tuple[int, bool]:
    """Return how many examples each process takes, and whether some are padding somewhere."""
    sizes = {info["size"] for info in infos}
    if len(sizes) == 1 and not any(info.get("masked") for info in infos):
        return sizes.pop(), False
    num_devices = jax.local_device_count()
    return -(-max(sizes) // num_devices) * num_devices, True


def _make_empty(batch: Any) -> Any:
    """Return a batch without examples that is otherwise like another one."""
    empty = jax.tree.map(lambda leaf: leaf[:0], _drop_count(batch))
    if isinstance(batch, fg.Batch) and batch.num_examples is not None:
        return replace(empty, num_examples=np.zeros_like(batch.num_examples))
    return empty


def _drop_count(batch: Any) -> Any:
    """Return a batch without `num_examples`, which has no example axis."""
    return replace(batch, num_examples=None) if isinstance(batch, fg.Batch) else batch


def _pad_leaf(leaf: Any, num_missing: int) -> Any:
    """Return an array with more examples, of zeros."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _pad_leaf(jax.random.key_data(leaf), num_missing)
        return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(leaf))
    array = np.asarray(leaf)
    return np.pad(array, [(0, num_missing)] + [(0, 0)] * (array.ndim - 1))


def _split_mask(batch: Any) -> tuple[Any, Any]:
    """Return a batch as it is without a mask, and its mask; None for none."""
    if not isinstance(batch, fg.Batch):
        return batch, None
    has_arrays_only = batch.spec is None and batch.num_examples is None
    return batch.value if has_arrays_only else replace(batch, mask=None), batch.mask


def _pad_batch(batch: Any, size: int) -> fg.Batch:
    batch, mask = _split_mask(batch)
    leaves, structure = jax.tree.flatten(_drop_count(batch))
    num_missing = size - len(leaves[0])
    mask = np.ones(len(leaves[0]), bool) if mask is None else np.asarray(mask)
    padded = [_pad_leaf(leaf, num_missing) for leaf in leaves]
    mask = np.pad(mask, (0, num_missing))
    value = structure.unflatten(padded)
    if not isinstance(batch, fg.Batch):
        return fg.Batch(value, mask)
    return replace(value, mask=mask, num_examples=batch.num_examples)
