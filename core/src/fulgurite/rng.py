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

from fulgurite.errors import PluginError, did_you_mean

RngPhase = Literal["init", "train", "eval"]
AnyKey = Key[Array, ""]
Count = int | Int[Array, ""]


@dataclass(frozen=True)
class RngStream:
    """A named stream and the phases that draw from it. Without `per_step` every step draws the same
    key."""

    name: str
    init: bool = False
    train: bool = False
    eval: bool = False
    per_step: bool = True


PARAMS = RngStream("params", init=True, per_step=False)
DEFAULT = RngStream("default", train=True)


class RngStreams:
    """The streams of an engine over a root key. Every method may be traced, with a traced step or
    index."""

    def __init__(self, root: AnyKey, streams: Iterable[RngStream] = (PARAMS, DEFAULT)) -> None:
        self.root = root
        self.streams = {stream.name: stream for stream in streams}

    def init_keys(self) -> dict[str, AnyKey]:
        """One key for every stream of the init phase."""
        return {
            name: self.key(name, "init") for name, stream in self.streams.items() if stream.init
        }

    def train_keys(self, step: Count) -> dict[str, AnyKey]:
        """One key for every training stream at `step`, the number of updates completed before
        it."""
        return {
            name: self.key(name, "train", step)
            for name, stream in self.streams.items()
            if stream.train
        }

    def eval_keys(
        self, evaluator: str, index: Count, step: Count | None = None
    ) -> dict[str, AnyKey]:
        """One key for every evaluation stream, for batch `index` of `evaluator`: the same at every
        evaluation, unless `step` is given."""
        names = [name for name, stream in self.streams.items() if stream.eval]
        return {name: fold_name(self.key(name, "eval", step), evaluator, index) for name in names}

    def key(self, name: str, phase: RngPhase, step: Count | None = None) -> AnyKey:
        """The key of stream `name`: the root folded with the name, the step (if the stream is per
        step and a step is given) and the phase's name."""
        if name not in self.streams:
            fix = f"Install fulgurite-rng and add fulgurite_rng.Rng(fg.RngStream({name!r}, train=True)) to the plugins."
            raise PluginError(
                f"no random stream is called {name!r}. {did_you_mean(name, self.streams)} {fix}"
            )
        key = fold_name(self.root, name)
        if step is not None and self.streams[name].per_step:
            key = jax.random.fold_in(key, step)
        return fold_name(key, phase)


def fold_name(key: AnyKey, name: str, *indices: Count) -> AnyKey:
    """`key` folded with the first four bytes of the SHA-1 of `name`, big-endian, then with each of
    `indices`. Python's own `hash` differs between processes and would give every host and every
    restart other numbers."""
    key = jax.random.fold_in(key, int.from_bytes(hashlib.sha1(name.encode()).digest()[:4], "big"))
    for index in indices:
        key = jax.random.fold_in(key, index)
    return key
