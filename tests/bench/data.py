"""How fast batches are read, against Grain, torch's DataLoader, and NumPy by hand.

    tokens    windows of 1,024 tokens with their targets, shuffled, 32 in a batch, from a memory map
              of 10**8 tokens
    packed    documents of 20 to 400 tokens, first fit into rows of 1,024, 32 in a batch
    images    JPEG files of 160 x 160 pixels, decoded and scaled to 96 x 96, 32 in a batch
    photos    the same of 640 x 480 pixels, by ours with `draft=True`, which decodes them at a quarter
              of their size, so that pixels differ a little

All arms of a workload but `photos` yield the same arrays, and none copies them to a device. All run
with their defaults: Grain with 16 threads for elements, images of ours with 4 for batches.
`numpy` is a loop over a permutation of NumPy, made beforehand, that copies slices. The ratios are
examples a second of ours over those of the other: above 1, ours is faster. Those of CPU time, which
other work on the machine disturbs less, are of the CPU seconds that all threads take.

Of `images`, nine tenths of the CPU time of both arms are in libjpeg and in Pillow's filter for sizes, so
that nothing around them makes one three times as fast as the other.

`first batch` is the time to the first batch of a shuffle of 10**9 examples, `resume` that to a
batch a million steps on, and `memory` what the former allocates.
"""

import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import fulgurite_data as fd
import grain
import numpy as np
from fulgurite.plugins import BatchIterator
from grain.experimental import FirstFitPackIterDataset
from harness import Spread, arguments, interleaved, ratio, show, write
from PIL import Image

NUM_TOKENS = 10**8
SIZE = 1024
BATCH = 32
NUM_BATCHES = 1000
Batches = Iterator[Any]
Arms = dict[str, Callable[[], Batches]]


class Windows:
    """The windows of a file of tokens, for Grain and torch."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint16, "r").view(np.ndarray)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SIZE

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        run = self.tokens[index * SIZE : (index + 1) * SIZE + 1].astype(np.int32)
        return {"tokens": run[:-1], "targets": run[1:]}

    def __repr__(self) -> str:
        return "Windows()"


def make_token_arms(folder: Path) -> Arms:
    """Return the arms for windows."""
    path = folder / "tokens.bin"
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(10):
            file.write(rng.integers(0, 50_000, NUM_TOKENS // 10, dtype=np.uint16).tobytes())
    windows = Windows(path)
    ours = fd.Tokens(path, has_offsets=False).window(SIZE).shuffle().batch(BATCH, remainder="drop")
    order = np.random.default_rng(0).permutation(len(windows))

    def by_hand() -> Batches:
        tokens = windows.tokens
        for low in range(0, len(order) - BATCH, BATCH):
            starts = (order[low : low + BATCH] * SIZE).tolist()
            runs = np.stack([tokens[start : start + SIZE + 1] for start in starts])
            yield {"tokens": runs[:, :-1].astype(np.int32), "targets": runs[:, 1:].astype(np.int32)}

    def with_grain() -> Batches:
        return iter(grain.MapDataset.source(windows).shuffle(seed=0).batch(BATCH).to_iter_dataset())

    arms: Arms = {"ours": lambda: iter(ours), "numpy": by_hand, "grain": with_grain}
    if find_spec("torch") is not None:
        import torch  # pyright: ignore[reportMissingImports]

        arms["torch"] = lambda: iter(
            torch.utils.data.DataLoader(windows, BATCH, shuffle=True, drop_last=True)
        )
    return arms


def make_packed_arms(folder: Path) -> Arms:
    """Return the arms for packed documents."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 400, 20_000)
    documents = [rng.integers(0, 50_000, length) for length in lengths]
    path = fd.write_tokens(folder / "documents.bin", documents)
    ours = fd.Tokens(path).pack(SIZE, open_rows=8).shuffle().batch(BATCH)
    source = [{"tokens": document.astype(np.int32)} for document in documents]

    def with_grain() -> Batches:
        dataset = grain.MapDataset.source(source).shuffle(seed=0).to_iter_dataset()
        packed = FirstFitPackIterDataset(
            dataset, length_struct={"tokens": SIZE}, num_packing_bins=8, shuffle_bins=True
        )
        return iter(packed.batch(BATCH))

    return {"ours": lambda: iter(ours), "grain": with_grain}


class Decoded:
    """Image files, for Grain."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with Image.open(self.paths[index]) as image:
            return {"image": np.asarray(image.convert("RGB").resize((96, 96)))}

    def __repr__(self) -> str:
        return "Decoded()"


def make_image_arms(images: Path, size: tuple[int, int], number: int, *, draft: bool) -> Arms:
    """Return the arms for images of some width and height."""
    images.mkdir()
    rng = np.random.default_rng(0)
    paths = [images / f"{index:05}.jpg" for index in range(number)]
    for path in paths:
        small = Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8))
        small.resize(size).save(path, quality=90)
    ours = fd.Images(images, size=(96, 96), draft=draft).shuffle().batch(BATCH)

    def with_grain() -> Batches:
        dataset = grain.MapDataset.source(Decoded(paths)).shuffle(seed=0)
        return iter(dataset.batch(BATCH).to_iter_dataset())

    return {"ours": lambda: iter(ours), "grain": with_grain}


class Meter:
    """Times the batches of an arm.

    Attributes:
        cpu_seconds: the CPU time that a batch took, of all threads, in each round so far.
    """

    def __init__(self, build: Callable[[], Batches]) -> None:
        self.build = build
        self.cpu_seconds: list[float] = []

    def time_batches(self) -> float:
        """Return the seconds that a batch takes, over an epoch, or `NUM_BATCHES` if that is longer.
        The first batch counts: what was read ahead during it would not."""
        start, cpu_start = perf_counter(), process_time()
        number = sum(1 for _ in islice(self.build(), NUM_BATCHES))
        self.cpu_seconds.append((process_time() - cpu_start) / number)
        return (perf_counter() - start) / number


class Far:
    """A sequence of many small items."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        return index


def measure_seeks(folder: Path, repeats: int) -> dict[str, Spread]:
    """Return milliseconds to a first batch and to a batch far away, and kilobytes."""
    firsts, resumes, memories = [], [], []
    windows = fd.Tokens(folder / "tokens.bin", has_offsets=False).window(16, stride=1)
    position = {"epoch": 0, "batch": 10**6}
    for seed in range(repeats):
        start = perf_counter()
        fd.Items(Far()).shuffle().batch(BATCH).read(0, seed=seed)
        firsts.append(1e3 * (perf_counter() - start))
        tracemalloc.start()
        fd.Items(Far()).shuffle().batch(BATCH).read(0, seed=seed)
        memories.append(tracemalloc.get_traced_memory()[1] / 1e3)
        tracemalloc.stop()
        start = perf_counter()
        with BatchIterator(windows.shuffle().batch(BATCH), seed=seed, position=position) as batches:
            next(batches)
        resumes.append(1e3 * (perf_counter() - start))
    return {
        "first batch of 10**9, ms": Spread.of(firsts),
        "memory of it, kB": Spread.of(memories),
        "resume at step 10**6, ms": Spread.of(resumes),
    }


def main() -> None:
    """Measure, print, and write."""
    options = arguments(__doc__, repeats=7).parse_args()
    ratios: dict[str, Spread] = {}
    cpu_ratios: dict[str, Spread] = {}
    rates: dict[str, Spread] = {}
    print("load of the machine", *os.getloadavg())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workloads = {
            "tokens": make_token_arms(folder),
            "packed": make_packed_arms(folder),
            "images": make_image_arms(folder / "images", (160, 160), 1024, draft=False),
            "photos": make_image_arms(folder / "photos", (640, 480), 512, draft=True),
        }
        for workload, arms in workloads.items():
            meters = {arm: Meter(build) for arm, build in arms.items()}
            seconds = interleaved(
                {arm: meter.time_batches for arm, meter in meters.items()}, options.repeats
            )
            cpu_seconds = {arm: meter.cpu_seconds for arm, meter in meters.items()}
            for arm, values in seconds.items():
                rates[f"{workload}.{arm}"] = Spread.of([BATCH / value for value in values])
                if arm != "ours":
                    ratios[f"{workload}.over_{arm}"] = ratio(seconds, arm, "ours")
                    cpu_ratios[f"{workload}.over_{arm}"] = ratio(cpu_seconds, arm, "ours")
        seeks = measure_seeks(folder, options.repeats)
    print("load of the machine", *os.getloadavg())
    show("examples a second", rates)
    show("ours over the other", ratios)
    show("ours over the other, by CPU time", cpu_ratios)
    show("seeking", seeks)
    if "tokens.over_torch" not in ratios:
        print("torch is not installed: tokens.over_torch was not measured")
    if options.json is not None:
        write(options.json, ratios, cpu_ratios=cpu_ratios, rates=rates, seeks=seeks)


if __name__ == "__main__":
    main()
