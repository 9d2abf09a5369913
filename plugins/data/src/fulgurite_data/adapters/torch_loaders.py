"""PyTorch's `DataLoader`, and torchdata's `StatefulDataLoader`."""

import multiprocessing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import fulgurite as fg
import jax
import numpy as np
from fulgurite.errors import ConfigurationError, DataError, check_one_of

from fulgurite_data.adapters.passes import CheckedPasses, get_length_hint

if TYPE_CHECKING:
    from torch.utils.data import DataLoader  # pyright: ignore[reportMissingImports]


def from_torch(
    loader: "DataLoader[Any]",
    *,
    resume: Literal["replay", "restart"] | None = None,
    prefetch: int = 2,
) -> fg.DataSource:
    """Return a PyTorch loader as a data source of NumPy batches, in the dtypes of its tensors.

    A `StatefulDataLoader` of torchdata resumes exactly, with the number of workers that it had. A
    `DataLoader` has no state: a run with a `Checkpointer` refuses it unless `resume` says what the
    run may expect.

    Example:
        import torch
        from fulgurite_data import from_torch

        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.arange(256)),
            batch_size=64,
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
            num_workers=2,
            multiprocessing_context="spawn",
        )
        data = from_torch(loader, resume="replay")

    Args:
        loader: a `DataLoader` whose workers, if it has any, are spawned.
        resume: for a `DataLoader`. `replay`: the batches of a pass are read again up to the
            position, and compared with a checksum, so that the run is exact or fails before its
            first step. Each pass seeds the loader's generator by its number, or calls its sampler's
            `set_epoch`. `restart`: a resumed run begins with the first batch, and is not exact.
        prefetch: as of `fg.DataSource`.

    Raises:
        ConfigurationError: the workers are forked, or the order cannot be repeated and `resume` is
            `replay`.
    """
    _check_workers(loader)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        if resume is not None:
            raise ConfigurationError(
                f"from_torch: a {type(loader).__name__} has a state and resumes exactly: leave out "
                f"resume={resume!r}"
            )
        return fg.DataSource(StatefulLoader(loader), resume="exact", prefetch=prefetch)
    if resume is None:
        return fg.DataSource(NumpyBatches(loader), prefetch=prefetch)
    check_one_of(resume, ("replay", "restart"), "from_torch: resume")
    if resume == "restart":
        return fg.DataSource(NumpyBatches(loader), resume="restart", prefetch=prefetch)
    _check_order(loader)
    return fg.DataSource(LoaderPasses(loader), resume="exact", prefetch=prefetch)


class NumpyBatches:
    """The batches of a loader as NumPy arrays.

    Attributes:
        resume_hint: what a `Checkpointer` says that refuses it.
    """

    resume_hint = (
        "Of a torch DataLoader: from_torch(loader, resume='replay') reads a pass again and checks "
        "that it is the same; a StatefulDataLoader of torchdata has a state"
    )

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __length_hint__(self) -> int:
        """Return the number of batches in a pass, where the loader knows it."""
        return get_length_hint(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass."""
        for batch in self.loader:
            yield as_numpy(batch)


class StatefulLoader:
    """A `StatefulDataLoader` as a source with a state of plain values and NumPy arrays.

    Its own state says what is left of a pass, and not how the next one is shuffled, which depends
    on how often its generator was used before. So that is seeded by the number of each pass.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._order = SeededOrder(loader)
        self._pass = 0
        self._has_begun = False

    def __length_hint__(self) -> int:
        """Return the number of batches in a pass, where the loader knows it."""
        return get_length_hint(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the pass; after its end, the next pass."""
        if not self._has_begun:
            self._order.seed_pass(self._pass)
        batches = iter(self.loader)
        for batch in batches:
            self._has_begun = True
            yield as_numpy(batch)
        self._pass += 1
        self._has_begun = False

    def get_state(self) -> dict[str, Any]:
        """Return the position right after the batch that was yielded last."""
        return {
            "pass": self._pass,
            "seeds": self._order.seeds,
            "num_workers": self.loader.num_workers,
            "loader": as_numpy(self.loader.state_dict()) if self._has_begun else None,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position: the next iteration continues from there.

        Args:
            state: as `get_state` returned it.

        Raises:
            DataError: the loader has another number of workers than the one whose state it is, or
                another sampler.
        """
        for name, value in (
            ("workers", self.loader.num_workers),
            ("generators", len(self._order.seeds)),
        ):
            saved = state["num_workers"] if name == "workers" else len(state["seeds"])
            if saved != value:
                raise DataError(
                    f"the StatefulDataLoader has {value} {name}, and that of the run had {saved}, "
                    "whose state cannot be given to it: make the loader as for the run"
                )
        self._pass = state["pass"]
        self._order.seeds = list(state["seeds"])
        self._has_begun = state["loader"] is not None
        if self._has_begun:
            self.loader.load_state_dict(_as_tensors(state["loader"]))


class LoaderPasses(CheckedPasses):
    """A `DataLoader` whose order follows from its seed and the number of the pass."""

    description = "the torch DataLoader"

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._order = SeededOrder(loader)

    def get_loader(self) -> Any:
        """Return the loader."""
        return self.loader

    def start_pass(self, number: int) -> Iterator[Any]:
        """Yield the batches of a pass.

        Args:
            number: of the pass, from 0.
        """
        self._order.seed_pass(number)
        for batch in self.loader:
            yield as_numpy(batch)


class SeededOrder:
    """The order of a loader as a function of a seed and the number of the pass.

    Attributes:
        seeds: of the generators of the loader and its samplers, as they were made.
    """

    def __init__(self, loader: Any) -> None:
        self._generators = _find_generators(loader)
        self._samplers = [s for s in _list_samplers(loader) if hasattr(s, "set_epoch")]
        self.seeds = [generator.initial_seed() for generator in self._generators]

    def seed_pass(self, number: int) -> None:
        """Seed all generators for a pass.

        Args:
            number: of the pass, from 0.
        """
        for generator, seed in zip(self._generators, self.seeds, strict=True):
            words = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)
            generator.manual_seed(int(words[0] >> np.uint64(1)))
        for sampler in self._samplers:
            sampler.set_epoch(number)


def as_numpy(tree: Any) -> Any:
    """Return a tree with a NumPy array for each tensor, of the same dtype.

    Args:
        tree: what a loader yields, or its state.
    """
    return jax.tree.map(_as_numpy_leaf, tree, is_leaf=lambda node: node is None)


def _as_numpy_leaf(leaf: Any) -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # which NumPy has from jax
        return tensor.view(torch.uint16).numpy().view(jax.numpy.bfloat16)
    return tensor.numpy()


def _as_tensors(tree: Any) -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    def convert(leaf: Any) -> Any:
        return torch.from_numpy(np.array(leaf)) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(convert, tree, is_leaf=lambda node: node is None)


def _check_workers(loader: Any) -> None:
    """Raise `ConfigurationError` if a loader forks this process."""
    if not loader.num_workers:
        return
    context = loader.multiprocessing_context
    method = context.get_start_method() if context else multiprocessing.get_start_method()
    if method == "fork":
        raise ConfigurationError(
            f"from_torch: the {loader.num_workers} workers of this loader are forked, and jax has "
            "threads of its own, so that they may hang. Give the loader "
            "multiprocessing_context='spawn'; the program needs `if __name__ == '__main__':`, and "
            "the dataset must be importable"
        )


def _check_order(loader: Any) -> None:
    """Raise `ConfigurationError` if it is plain that no pass of a loader can be read again."""
    if not getattr(loader, "in_order", True):
        raise ConfigurationError(
            "from_torch: resume='replay' needs batches in a fixed order, and this loader has "
            "in_order=False"
        )
    for sampler in _list_samplers(loader):
        if hasattr(sampler, "generator") and sampler.generator is None:
            raise ConfigurationError(
                f"from_torch: the order of this loader's {type(sampler).__name__} comes from the "
                "random numbers of the whole program, so that no pass can be read again: give the "
                "loader generator=torch.Generator().manual_seed(0), and the sampler if you made it"
            )


def _list_samplers(loader: Any) -> list[Any]:
    samplers = [
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    ]
    return [sampler for sampler in samplers if sampler is not None]


def _find_generators(loader: Any) -> list[Any]:
    """Return the generators of a loader and its samplers, each of them once."""
    holders = [loader, *_list_samplers(loader)]
    generators = [getattr(holder, "generator", None) for holder in holders]
    return list({id(generator): generator for generator in generators if generator}.values())
