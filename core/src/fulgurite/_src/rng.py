"""Named streams of random keys, all folded from one root key.

A key is a function of the root, the stream's name, the step and the phase, and of nothing else:
adding a stream, a plugin or an evaluator changes no other key.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import jax
from jaxtyping import Array, Int, Key

from fulgurite._src import threefry
from fulgurite.errors import PluginError, did_you_mean

RngPhase = Literal["init", "train", "eval"]
AnyKey = Key[Array, ""]
Count = int | Int[Array, ""]


@dataclass(frozen=True)
class RngStream:
    """A named stream of random keys.

    Example:
        from fulgurite_rng import Rng

        engine = fg.Engine(steps=100, plugins=[Rng(fg.RngStream("noise"))])

    Attributes:
        name: folded into every key of the stream.
        init: whether the model gets a key when it is made.
        train: whether training steps get one, as they do unless told otherwise.
        eval: whether evaluations get one.
        per_step: whether each step gets another key; without it all get the same.
    """

    name: str
    init: bool = False
    train: bool = True
    eval: bool = False
    per_step: bool = True


PARAMS = RngStream("params", init=True, train=False, per_step=False)
DEFAULT = RngStream("default")


class RngStreams:
    """The streams of an engine over a root key.

    Every method may be traced, with a traced step or index.

    Example:
        streams = fg.RngStreams(jax.random.key(0))
        key = streams.key("default", "train", step=7)
    """

    def __init__(self, root: AnyKey, streams: Iterable[RngStream] = (PARAMS, DEFAULT)) -> None:
        self.root = root
        self.streams = {stream.name: stream for stream in streams}

    def init_keys(self) -> dict[str, AnyKey]:
        """Return one key for every stream of the init phase."""
        names = [name for name, stream in self.streams.items() if stream.init]
        return {name: self.key(name, "init") for name in names}

    def train_keys(self, step: Count) -> dict[str, AnyKey]:
        """Return one key for every training stream at `step`, the number of updates completed
        before it."""
        names = [name for name, stream in self.streams.items() if stream.train]
        return {name: self.key(name, "train", step) for name in names}

    def eval_keys(
        self, evaluator: str, index: Count, step: Count | None = None
    ) -> dict[str, AnyKey]:
        """Return one key for every evaluation stream.

        Args:
            evaluator: the name of the evaluation.
            index: the number of the batch.
            step: that of the evaluation. Without it every evaluation gets the same keys.
        """
        names = [name for name, stream in self.streams.items() if stream.eval]
        return {name: fold_name(self.key(name, "eval", step), evaluator, index) for name in names}

    def key(self, name: str, phase: RngPhase, step: Count | None = None) -> AnyKey:
        """Return the key of a stream: the root folded with its name, the step and the phase.

        Args:
            name: the stream.
            phase: `init`, `train` or `eval`.
            step: folded in if the stream is per step.

        Raises:
            PluginError: there is no such stream.
        """
        if name not in self.streams:
            raise PluginError(
                f"no random stream is called {name!r}. {did_you_mean(name, self.streams)} Add "
                f"Rng(fg.RngStream({name!r})) of fulgurite-rng to the plugins."
            )
        key = fold_name(self.root, name)
        if step is not None and self.streams[name].per_step:
            key = _fold_in(key, step)
        return fold_name(key, phase)


def make_root_key(seed: int) -> AnyKey:
    """Return the key of a seed of up to 63 bits."""
    if threefry.is_default_impl():
        return threefry.make_key(seed)
    if seed < 2**32:
        return jax.random.key(seed)
    # Without x64 jax would leave out the upper half: 2**32 + 5 would be the seed 5.
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        return jax.random.key(seed)


def fold_name(key: AnyKey, name: str, *indices: Count) -> AnyKey:
    """Return a key folded with a name and then with each of `indices`.

    The name counts by the first four bytes of its SHA-1, big-endian. Python's own `hash` differs
    between processes and would give every host and every restart other numbers.

    Args:
        key: the key to fold into.
        name: any string.
        indices: numbers, traced or not.
    """
    name_hash = int.from_bytes(hashlib.sha1(name.encode()).digest()[:4], "big")
    for data in (name_hash, *indices):
        key = _fold_in(key, data)
    return key


def _fold_in(key: AnyKey, data: Count) -> AnyKey:
    """Return `jax.random.fold_in(key, data)`, without a program of XLA where that can be."""
    is_known = isinstance(data, int) and 0 <= data < 2**32
    words = threefry.read_words(key) if is_known else None
    return jax.random.fold_in(key, data) if words is None else threefry.fold_in(words, int(data))
