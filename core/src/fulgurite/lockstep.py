"""What several processes do alike: fits that begin with the same, and evaluations with as many
batches on each."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fulgurite.consensus import FIT, ProcessSync
from fulgurite.data.iterator import BatchIterator
from fulgurite.data.sources import MaskedBatch
from fulgurite.errors import ConfigurationError, DataError, ProcessError
from fulgurite.placing import BatchSharding
from fulgurite.tree.specs import digest

if TYPE_CHECKING:
    from fulgurite.engine import Engine


def assert_equal_across_processes(consensus: ProcessSync, name: str, told: dict[str, Any]) -> None:
    """A `ConfigurationError`, on every process alike, for what is not the same on all those that
    tell of it: each would train something else, or wait for what the others never do."""
    seen: dict[str, tuple[int, Any]] = {}
    for process, answer in enumerate(consensus.all_gather(name, told)):
        for what, value in answer.items():
            first, wanted = seen.setdefault(what, (process, value))
            if value != wanted:
                gap = f"{what}: {wanted} on process {first}, and {value} on process {process}"
                fix = "the same program with the same settings, seed and model, and equally many batches of one size"
                raise ConfigurationError(
                    f"the processes of one training differ in {gap}. Each must run {fix}"
                )


def check_same_start(
    engine: "Engine",
    given: Any,
    batch: Any,
    placing: BatchSharding,
    feed: BatchIterator,
    **length: int | None,
) -> None:
    """`check_alike` at the beginning of a fit from the arrays `given`, whose first batch is
    `batch`."""
    if jax.process_count() > 1:
        told = {
            name: getattr(engine, name) for name in ("seed", "limit_train_batches", "on_nonfinite")
        } | length
        told |= {"batches an epoch": feed.epoch_length, "arrays": digest(given)}
        assert_equal_across_processes(engine.sync, FIT, told | placing.fingerprint(batch))


def iter_aligned_batches(feed: BatchIterator, consensus: ProcessSync) -> Iterator[Any]:
    """The batches of `feed`; with several processes, equally many on each. A `DataError` for
    batches of several structures or without an example axis on every process alike, a
    `ProcessError` for another process that failed.

    A process whose data has ended takes part with batches that are empty: of the size of the
    others, and masked. One whose batch is smaller is filled up likewise. Where all batches are of
    one size, nothing is masked."""
    if jax.process_count() == 1:
        yield from (item.batch for item in feed)
        return
    index, last = 0, None
    while True:
        batch, failure, told = None, None, dict[str, Any](size=0)
        try:
            item = next(feed, None)
            batch = None if item is None else item.batch
            told = told if batch is None else _describe_batch(batch)
        except Exception as error:
            failure = error
        answers = _gather_batch_infos(consensus, f"batch {index} of an evaluation", told, failure)
        size, masked = _common_size(answers)
        if not size:
            return
        last = batch if batch is not None else jax.tree.map(lambda leaf: leaf[:0], last)
        yield _pad_batch(last, size) if masked else last
        index += 1


def raise_on_any_process(consensus: ProcessSync, failure: Exception | None) -> None:
    """The end of an evaluation that may do anything: if it has failed on one process, it fails on
    all of them."""
    if jax.process_count() > 1:
        _gather_batch_infos(consensus, "an evaluation", {"size": 0}, failure)


def _describe_batch(batch: Any) -> dict[str, Any]:
    value, masked = (batch.batch, True) if isinstance(batch, MaskedBatch) else (batch, False)
    leaves, structure = jax.tree.flatten(value)
    lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        shapes = [list(leaf.shape) for leaf in leaves]
        raise DataError(
            f"all arrays of a batch must begin with the same example axis, and these are {shapes}"
        )
    spec = [f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in leaves]
    return {"size": lengths.pop(), "masked": masked, "spec": f"{spec} in {structure}"}


def _gather_batch_infos(
    consensus: ProcessSync, what: str, told: dict[str, Any], failure: Exception | None
) -> list[dict[str, Any]]:
    """What each process tells; a failure of one is an error on all of them."""
    told = told if failure is None else {"error": f"{type(failure).__name__}: {failure}"}
    answers = consensus.all_gather("evaluation", told)
    if failure is not None:
        raise failure
    for process, answer in enumerate(answers):
        if "error" in answer:
            raise ProcessError(f"process {process} failed to make {what}: {answer['error']}")
    specs = {answer["spec"]: process for process, answer in enumerate(answers) if "spec" in answer}
    if len(specs) > 1:
        (one, first), (other, second), *_ = specs.items()
        raise DataError(f"{what} is {one} on process {first}, and {other} on process {second}")
    return answers


def _common_size(answers: list[dict[str, Any]]) -> tuple[int, bool]:
    """How many examples each process takes, and whether some of them are padding somewhere."""
    sizes = {answer["size"] for answer in answers}
    if len(sizes) == 1 and not any(answer.get("masked") for answer in answers):
        return sizes.pop(), False
    parts = jax.local_device_count()
    return -(-max(sizes) // parts) * parts, True


def _pad_batch(batch: Any, size: int) -> MaskedBatch:
    value, mask = (batch.batch, batch.mask) if isinstance(batch, MaskedBatch) else (batch, None)
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, value))
    missing = size - len(leaves[0])
    mask = np.ones(len(leaves[0]), bool) if mask is None else np.asarray(mask)
    padded = [np.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)) for leaf in leaves]
    return MaskedBatch(structure.unflatten(padded), np.pad(mask, (0, missing)))
