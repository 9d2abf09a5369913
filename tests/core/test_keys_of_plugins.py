"""Random numbers of plugins: by hand from the seed, and none depends on another plugin."""

import hashlib
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hook_plugins import Blurred, Noise, engine, plugin
from models import Counting, Linear, assert_same_bits, numbers, regression, trained


class Drawing(Counting):
    """Logs a random number of the stream `noise` at every step."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        drawn = jax.random.uniform(ctx.key("noise"))
        return (
            super()
            .training_step(batch, ctx)
            .replace(metrics={"drawn": fg.metrics.LastValue.from_values(drawn)})
        )


@pytest.mark.hook("register_rng_streams")
def test_rng_streams_are_available_by_name() -> None:
    noise = plugin("noisy", register_rng_streams=lambda self: [fg.RngStream("noise", train=True)])
    result = engine(noise, steps=3, seed=7, log_every=1).fit(Drawing, numbers([0]))
    expected = [jax.random.uniform(by_hand(7, "noise", step, "train")).item() for step in range(3)]
    assert result.history["train/drawn"].tolist() == expected


def by_hand(seed: int, stream: str, step: int, phase: str) -> Any:
    """A key as row K9 of spec/parity.md says: the root folded with the stream's name, the step and
    the phase."""

    def word(name: str) -> int:
        return int.from_bytes(hashlib.sha1(name.encode()).digest()[:4], "big")

    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), word(stream)), step)
    return jax.random.fold_in(key, word(phase))


@pytest.mark.full
def test_gradient_transforms_have_keys_of_their_own() -> None:
    """The noise of one is that of optax with its key: another one for each plugin and seed, the
    same in each run."""
    keys: dict[tuple[int, str], Any] = {}

    def weight(seed: int) -> float:
        def noise(self: Any, key: Any) -> optax.GradientTransformation:
            keys[seed, self.plugin_name] = key
            return optax.add_noise(1.0, 0.55, key)

        plugins = [plugin(name, gradient_transform=noise) for name in ("one", "other")]
        return float(
            engine(*plugins, steps=3, seed=seed).fit(Counting(), numbers([0])).module.weight
        )

    weights = weight(0), weight(1), weight(0)
    assert weights[0] == weights[2] != weights[1]
    assert len({jax.random.key_data(key).tobytes() for key in keys.values()}) == 4
    expected, transform = (
        0.0,
        optax.chain(*(optax.add_noise(1.0, 0.55, keys[0, name]) for name in ("one", "other"))),
    )
    state = transform.init(jnp.zeros(()))
    for _ in range(3):
        update, state = transform.update(jnp.ones(()), state)
        expected -= np.asarray(update).item()
    assert weights[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_adding_a_plugin_changes_no_other_random_number() -> None:
    settings = {"steps": 4, "seed": 3, "log_every": 1}
    alone = engine(**settings).fit(Blurred, regression())
    single = engine(Noise("a"), **settings).fit(Blurred, regression())
    two = engine(Noise("b"), Noise("a"), **settings).fit(Blurred, regression())
    for result in (single, two):
        assert_same_bits(trained(result.state), trained(alone.state))
        assert result.history["train/loss"].tobytes() == alone.history["train/loss"].tobytes()
    assert_same_bits(single.state.plugin_states["noise:a"], two.state.plugin_states["noise:a"])
    assert (
        single.history["train/noise:a/drawn"].tobytes()
        == two.history["train/noise:a/drawn"].tobytes()
    )
    drawn = [*two.history["train/noise:a/drawn"], *two.history["train/noise:b/drawn"]]
    assert len(set(drawn)) == 8
    assert not np.array_equal(
        two.state.plugin_states["noise:a"], two.state.plugin_states["noise:b"]
    )


def test_key_of_a_plugin_state_is_its_own() -> None:
    def slices(*plugins: Any) -> dict[str, Any]:
        return engine(*plugins).init_state(Linear(), regression()).plugin_states

    both, alone = slices(Noise("b"), Noise("a")), slices(Noise("a"))
    assert_same_bits(both["noise:a"], alone["noise:a"])
    assert not np.array_equal(both["noise:a"], both["noise:b"])
