"""Steps of a run executed again: proof, bisection, and the operation that made NaN."""

__tracebackhide__ = True

from fulgurite_replay.digests import (
    Digests as Digests,
    StateDigest as StateDigest,
    digest_state as digest_state,
    read_digests as read_digests,
)
from fulgurite_replay.proof import (
    Difference as Difference,
    Divergence as Divergence,
    Proof as Proof,
    bisect as bisect,
    verify as verify,
)
from fulgurite_replay.rerun import (
    Observer as Observer,
    Recorded as Recorded,
    train_again as train_again,
)
