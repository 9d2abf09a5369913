"""What the presets make of a transformer, and what is communicated."""

import importlib.util
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
from eight_devices import (
    Compilations,
    engine,
    whole,
)
from fulgurite.plugins import as_model_init
from fulgurite_sharding import (
    FSDP,
    DataParallel,
    Sharding,
    TensorParallel,
    bytes_per_device,
)
from jax.sharding import PartitionSpec as P

EXAMPLE = Path(__file__).parents[4] / "examples" / "transformer.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("transformer", EXAMPLE)
    assert spec and spec.loader
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


transformer = example()


Transformer = partial(transformer.Transformer, 128, 1, 4, 1e-3)


TEXT = fg.ArrayData(np.random.default_rng(0).integers(0, 256, (64, 17), np.uint8), 16, shuffle=True)


@cache
def stepped(preset: Callable[[], Sharding]) -> tuple[Any, fg.TrainState, fg.TrainState, str, float]:
    """Under a preset the transformer's initial state, what became of it, the state after a step,
    HLO and loss."""
    compilations = Compilations()
    trained = engine(preset(), compilations)
    before = trained.init_state(Transformer, TEXT)
    after, output = trained.step(before, next(iter(TEXT)))
    (compiled,) = compilations.compilations
    assert output.loss is not None
    return trained, before, after, compiled.as_text(), float(output.loss)


def tensor() -> Sharding:
    return TensorParallel(transformer.RULES, size=4)


def both() -> Sharding:
    return FSDP(mesh={"data": -1, "model": 4}, rules=transformer.RULES)


def collectives(hlo: str) -> set[str]:
    return set(
        re.findall(
            r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(",
            hlo,
        )
    )


def test_data_parallel_adds_up_gradients_and_gathers_no_parameter() -> None:
    assert collectives(stepped(DataParallel)[3]) == {"all-reduce"}


def test_fsdp_gathers_parameters_and_scatters_gradients() -> None:
    hlo = stepped(FSDP)[3]
    # On the CPU a reduce-scatter is an all-reduce of which each device takes its part.
    assert collectives(hlo) in (
        {"all-gather", "all-reduce"},
        {"all-gather", "all-reduce", "reduce-scatter"},
    )
    gathered = sorted(re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", hlo))
    # Four weights of the block's attention and two of its hidden layer, the embedding and the head.
    assert gathered == sorted([*["128,128"] * 4, "512,128", "128,512", *["256,128"] * 2]), gathered


def test_fsdp_moves_no_activations() -> None:
    """Which the compiler does to a perceptron unless it is told where to gather."""
    compilations = Compilations()
    perceptron = fg.Task(
        eqx.nn.MLP(64, 16, 128, 2, key=jax.random.key(0)),
        loss=lambda preds, batch: ((preds - batch[1]) ** 2).sum(1),
        optimizer=optax.adam(1e-3),
    )
    trained = engine(FSDP(min_size=64), compilations)
    batch = np.ones((64, 64), np.float32), np.ones((64, 16), np.float32)
    trained.step(trained.init_state(perceptron, [batch]), batch)
    hlo = compilations.compilations[0].as_text()
    assert collectives(hlo) <= {"all-gather", "all-reduce", "reduce-scatter"}
    gathered = sorted(re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", hlo))
    assert gathered == sorted(["128,64", "128", "128,128", "128", "16,128"]), gathered


def test_tensor_parallel_adds_up_activations_and_gathers_no_parameter() -> None:
    hlo = stepped(tensor)[3]
    assert "all-reduce" in collectives(hlo)
    assert not re.search(r"f32\[(128|512),(128|512)\]\S* all-gather", hlo)


def test_all_presets_compute_one_loss() -> None:
    losses = [stepped(preset)[4] for preset in (whole, DataParallel, FSDP, tensor, both)]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_fsdp_leaves_each_device_an_eighth() -> None:
    sizes = [
        bytes_per_device((stepped(plugin_class)[2].module, stepped(plugin_class)[2].opt_state))
        for plugin_class in (DataParallel, FSDP)
    ]
    assert sizes[1] <= 0.15 * sizes[0], sizes
    assert bytes_per_device(stepped(both)[2].module) <= 0.2 * bytes_per_device(
        stepped(whole)[2].module
    )


def test_parameters_lie_as_the_rules_say_and_adam_follows() -> None:
    state = stepped(tensor)[2]
    adam = state.opt_state[1][0]
    for module in (state.module, adam.mu, adam.nu):
        block = module.blocks[0]
        assert block.attention.query.weight.sharding.spec == P("model", None)
        assert block.attention.output.weight.sharding.spec == P(None, "model"), (
            "the first rule that matches decides"
        )
        assert block.down.weight.sharding.shard_shape(block.down.weight.shape) == (128, 128)
        assert block.norms[0].weight.sharding.spec == P()
    combined = stepped(both)[2].module
    assert combined.blocks[0].up.weight.sharding.spec == P("model", "data")
    assert combined.embedding.weight.sharding.spec == P("data", None), "the largest dimension"


def test_a_model_is_never_whole_on_a_device_while_it_is_made() -> None:
    source, key = as_model_init(Transformer), jax.random.key(0)
    needed = {}
    for preset in (DataParallel, FSDP):
        program = engine(preset())._programs.get(source, (next(iter(TEXT)),), None)
        memory = (
            program.make_initializer(source)
            .lower(source.arrays, key, key)
            .compile()
            .memory_analysis()
        )
        needed[preset] = memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert needed[FSDP] <= 0.2 * needed[DataParallel], needed


def test_every_array_is_donated() -> None:
    for preset in (DataParallel, FSDP, both):
        _, before, after, hlo, _ = stepped(preset)
        # Scalars and the root key travel packed, and that they are not donated lets them be read
        # while steps run.
        parts = eqx.filter((before.module, before.opt_state), eqx.is_array)
        arrays = [leaf for leaf in jax.tree.leaves(parts) if leaf.ndim]
        assert arrays and all(leaf.is_deleted() for leaf in arrays)
        header = hlo[: hlo.index("\n")]
        assert len(re.findall(r"(?:may|must)-alias", header)) == len(arrays)
        assert not any(
            leaf.is_deleted() for leaf in jax.tree.leaves(eqx.filter(after, eqx.is_array))
        )
