"""Reads a loader of another library through its adapter, in a process of its own.

`loader_program.py KIND TOTAL` reads as many batches, from the position that comes in by standard
input, and prints the values of each and the position after it. `KIND` may end with a number of worker
processes: `torch-2`.
"""

import json
import sys
from importlib import import_module
from typing import Any

import numpy as np

SIZE = 22


class Numbers:
    """A map-style dataset."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {"x": np.int64(index), "y": np.array([index, 2 * index], np.float32)}

    def __repr__(self):
        return "Numbers()"


def make_torch(workers, **options):
    torch: Any = import_module("torch")

    context = {"multiprocessing_context": "spawn"} if workers else {}
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(
        Numbers(), 4, shuffle=True, generator=generator, num_workers=workers, **context, **options
    )


def make_stateful(workers):
    torch: Any = import_module("torch")
    stateful: Any = import_module("torchdata.stateful_dataloader")

    context = {"multiprocessing_context": "spawn"} if workers else {}
    generator = torch.Generator().manual_seed(3)
    return stateful.StatefulDataLoader(
        Numbers(), 4, shuffle=True, generator=generator, num_workers=workers, **context
    )


def make_grain(workers) -> Any:
    import grain

    dataset = grain.MapDataset.source(Numbers()).shuffle(seed=3).batch(4)
    if not workers:
        return dataset
    options = grain.MultiprocessingOptions(num_workers=workers)
    return dataset.to_iter_dataset().mp_prefetch(options)


def make_grain_loader(workers):
    import grain

    sampler = grain.samplers.IndexSampler(
        SIZE, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=3
    )
    return grain.DataLoader(
        data_source=Numbers(),
        sampler=sampler,
        worker_count=workers,
        operations=[grain.transforms.Batch(4)],
    )


def make_iterable():
    datasets: Any = import_module("datasets")

    rows = [Numbers()[index] for index in range(SIZE)]
    columns = {"x": [int(row["x"]) for row in rows], "y": [row["y"].tolist() for row in rows]}
    features = datasets.Features(
        {"x": datasets.Value("int64"), "y": datasets.List(datasets.Value("float32"))}
    )
    dataset = datasets.Dataset.from_dict(columns, features).to_iterable_dataset(num_shards=3)
    return dataset.shuffle(seed=3, buffer_size=5)


def make_tfdata():
    tf: Any = import_module("tensorflow")

    rows = [Numbers()[index] for index in range(SIZE)]
    columns = {name: np.stack([row[name] for row in rows]) for name in ("x", "y")}
    dataset = tf.data.Dataset.from_tensor_slices(columns)
    return dataset.shuffle(8, seed=3, reshuffle_each_iteration=False).batch(4)


def make_source(kind):
    from fulgurite_data import from_grain, from_huggingface, from_tfdata, from_torch

    library, _, workers = kind.partition("-")
    workers = int(workers or 0)
    if library == "torch":
        return from_torch(make_torch(workers), resume="replay")
    if library == "stateful":
        return from_torch(make_stateful(workers))
    if library == "grain":
        return from_grain(make_grain(workers))
    if library == "grainloader":
        return from_grain(make_grain_loader(workers))
    if library == "huggingface":
        return from_huggingface(make_iterable(), 4)
    return from_tfdata(make_tfdata(), resume="replay")


def read(source, total, position=None):
    """Return the values of `total` batches from a position on, and the position after each."""
    from fulgurite.plugins import BatchIterator

    values = []
    positions = []
    with BatchIterator(source, seed=0, position=position) as batches:
        for _ in range(total):
            item = next(batches)
            assert item.batch["x"].dtype == np.int64
            assert item.batch["y"].dtype == np.float32
            assert (item.batch["y"][:, 1] == 2 * item.batch["x"]).all()
            values.append([item.batch["x"].tolist(), item.epoch_end])
            positions.append(as_json(item.position))
    return values, positions


def as_json(position):
    def encode(value):
        if isinstance(value, bytes):
            return {"bytes": value.decode()}
        return {"array": value.tolist(), "dtype": str(value.dtype)}

    return json.dumps(position, default=encode)


def from_json(text):
    def decode(value):
        if "bytes" in value:
            return value["bytes"].encode()
        return np.array(value["array"], value["dtype"]) if "array" in value else value

    return json.loads(text, object_hook=decode)


def main():
    kind, total = sys.argv[1], int(sys.argv[2])
    text = sys.stdin.read()
    values, positions = read(make_source(kind), total, from_json(text) if text else None)
    json.dump({"values": values, "positions": positions}, sys.stdout)


if __name__ == "__main__":
    main()
