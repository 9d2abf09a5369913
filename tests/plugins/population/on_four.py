"""Eight members on four devices; run by a test in a process of its own."""

import re

import fulgurite as fg
import jax
import numpy as np
from fulgurite_averaging import EMA, Average
from fulgurite_evaluators import Evaluator
from fulgurite_population import Evolution, Population
from populations import Net, fit, list_leaves, make_batches

COLLECTIVE = r"= \(?\w+\[([\d,]*)\].* (?:all-|collective-|reduce-scatter)[\w-]*\("


def compare_members_that_vary() -> None:
    """Compare members that differ in their learning rates and evolve, on four devices and on one."""
    batches = make_batches(4)

    def fit_on(num_devices: int | None) -> fg.FitResult:
        population = Population(
            seeds=range(4),
            vary={"learning_rate": [1e-4, 1e-3, 1e-2, 1e-1], "scale": [1, 2, 1, 2]},
            evolution=Evolution(every=2, monitor="test/loss"),
            num_devices=num_devices,
        )
        return fit(Net, batches, 4, population, Evaluator("test", batches[:1], every=2))

    divided, whole = fit_on(4), fit_on(None)
    assert divided.history["population/parent[0]"].size
    assert np.asarray(divided.module.members.scale).tolist() == [1, 2, 1, 2]
    leaves = [list_leaves((result.module, result.state.opt_state)) for result in (divided, whole)]
    for leaf, expected in zip(*leaves, strict=True):
        np.testing.assert_allclose(leaf, expected, atol=1e-6)


def main() -> None:
    """Compare populations on four devices with those on a single device."""
    compare_members_that_vary()
    texts = []
    spy = fg.LambdaPlugin(on_compile=lambda name, compiled: texts.append(compiled.as_text()))
    batches = make_batches(5)
    average = Average(EMA(decay=0.9))
    divided = fit(Net, batches, 5, Population(seeds=range(8), num_devices=4), spy, average)
    whole = fit(Net, batches, 5, Population(seeds=range(8)))
    weight = divided.module.members.net.layers[0].weight
    (averages,) = divided.state.plugin_states.values()
    average_weights = [leaf for leaf in list_leaves(averages) if leaf.shape == weight.shape]
    for array in (weight, *average_weights):
        assert [shard.data.shape for shard in array.addressable_shards] == [(2, 8, 4)] * 4
    assert average_weights
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
