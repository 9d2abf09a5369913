"""Case 7S7: eight members on four devices; run by a test in a process of its own."""

import re

import fulgurite as fg
import jax
import numpy as np
from fulgurite_population import Population
from populations import Net, fit, list_leaves, make_batches

COLLECTIVE = r"= \(?\w+\[([\d,]*)\].* (?:all-|collective-|reduce-scatter)[\w-]*\("


def main() -> None:
    """Compare a population on four devices with one on a single device."""
    texts = []
    spy = fg.LambdaPlugin(on_compile=lambda name, compiled: texts.append(compiled.as_text()))
    batches = make_batches(5)
    divided = fit(Net, batches, 5, Population(seeds=range(8), num_devices=4), spy)
    whole = fit(Net, batches, 5, Population(seeds=range(8)))
    weight = divided.module.members.net.layers[0].weight
    assert [shard.data.shape for shard in weight.addressable_shards] == [(2, 8, 4)] * 4
    for leaf, expected in zip(list_leaves(divided.module), list_leaves(whole.module), strict=True):
        np.testing.assert_allclose(leaf, expected, atol=1e-6)
    shapes = [match[1] for text in texts for match in re.finditer(COLLECTIVE, text)]
    sizes = [int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes]
    # A device holds 64 numbers of the first weight; a metric has five of each member.
    assert sizes
    assert max(sizes) <= 5 * 8, sizes
    assert jax.device_count() == 4


if __name__ == "__main__":
    main()
