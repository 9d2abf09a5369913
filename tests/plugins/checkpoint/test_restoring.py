"""What a fit continues from or begins with, and what must fit."""

import json
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from edits import update_hashes
from fulgurite.errors import CheckpointError, ConfigurationError, PathError
from fulgurite_checkpoint import Checkpointer
from fulgurite_testing import get_arrays
from trained import NET, ZEROS, Act, Average, Counting, Net, counting, engine, regression, steps_in


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `Counting` with checkpoints of steps 1 to 4."""
    path = tmp_path_factory.mktemp("run")
    counting(path, steps=4, max_to_keep=None)
    return path


def first_step(run: Path | None, resume: Any, **options: Any) -> tuple[int, float]:
    """The first step of a fit, and its weight after it."""
    observed: list[tuple[int, float]] = []
    look = Act(
        fg.FirstStepsAfterStart(1),
        lambda run: observed.append((run.step, float(run.state.module.weight))),
    )
    counting(run, look, steps=6, resume=resume, every=99, **options)
    return observed[0]


@pytest.mark.variants("full")
@pytest.mark.parametrize(("resume", "first"), [("auto", 5), ("latest", 5), (2, 3), ("never", 1)])
def test_resume_selects_the_checkpoint(run: Path, tmp_path: Path, resume: Any, first: int) -> None:
    shutil.copytree(run, tmp_path / "run")
    assert first_step(tmp_path / "run", resume) == (first, -first)
    aside = {"auto": [], "latest": [], 2: [3, 4], "never": [1, 2, 3, 4]}[resume]
    moved = sorted(path.name for path in (tmp_path / "run").glob("superseded/2/step-*"))
    assert moved == [f"step-{step}" for step in aside]
    assert steps_in(tmp_path / "run")[-1] == 6


@pytest.mark.full
def test_resume_from_another_run_or_one_of_its_checkpoints(run: Path, tmp_path: Path) -> None:
    assert first_step(tmp_path / "a", run) == (5, -5)
    assert first_step(tmp_path / "b", str(run / "checkpoints" / "step-3")) == (4, -4)
    assert first_step(tmp_path / "c", fg.CheckpointRef(run, 1)) == (2, -2)
    assert first_step(tmp_path / "d", "auto") == (1, -1)
    assert steps_in(run) == [1, 2, 3, 4]


def test_fresh_start_beside_checkpoints_must_be_explicit(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"newest of step 4.*resume='auto'.*resume='never'"):
        counting(run)
    assert steps_in(run) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("resume", "error", "says"),
    [
        (9, CheckpointError, r"no checkpoint of step 9.*There is: 1, 2, 3, 4"),
        ("best", CheckpointError, r"by which metric\? Its run had no monitor: give a step"),
        ("lastest", CheckpointError, r"no run in lastest"),
        ("", ConfigurationError, r"'auto', 'never'"),
        (True, ConfigurationError, r"resume is True"),
        (fg.CheckpointRef("gs9://bucket"), ConfigurationError, r"gs9://bucket"),
        ("checkpoints/step-9", CheckpointError, r"no checkpoint of step 9 in \."),
    ],
)
def test_invalid_resume_is_an_error(
    run: Path, resume: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        counting(run, resume=resume)


def test_resume_without_a_run_directory_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"resume names no run"):
        counting(None, resume="latest")


# --- what must fit --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, fg.FitResult]:
    """A run of `Net` with a plugin's slice, three steps long."""
    path = tmp_path_factory.mktemp("net")
    result = engine(path, Checkpointer(99), Average(), steps=3, seed=3).fit(NET, regression())
    return path, result


def going_on(
    net: tuple[Path, Any], model: Any, *plugins: Any, tmp_path: Path, **options: Any
) -> fg.FitResult:
    checkpoints = Checkpointer(99, **options)
    return engine(tmp_path, checkpoints, *plugins, steps=4, seed=3).fit(
        model, regression(), resume=net[0]
    )


def wide(*, key: Any) -> Any:
    return eqx.nn.make_with_state(Net)(key=key, width=5)


@pytest.mark.full
def test_changed_shapes_are_an_error_listing_all_of_them(net: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        going_on(net, wide, Average(), tmp_path=tmp_path)
    text = str(caught.value)
    assert "module.first.weight: saved float32[4, 3], wanted float32[5, 3]" in text
    assert "model_state.norm.ema_state_index[0]: saved float32[4], wanted float32[5]" in text


def test_the_model_of_a_checkpoint_that_differs_is_quoted_as_text(
    run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "theirs")
    checkpoint = tmp_path / "theirs" / "checkpoints" / "step-4"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["model"] = ["\x1b]0;title\x07"]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    update_hashes(checkpoint)
    with pytest.warns(UserWarning, match=r"may not be exact: .*- ?\\u001b\]0;title\\u0007"):
        counting(tmp_path / "mine", steps=5, resume=tmp_path / "theirs")


@pytest.mark.full
def test_a_missing_plugin_is_an_error_that_says_what_to_install(net: Any, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'average' \(module trained\) was active .* is not now: add it"
    ):
        going_on(net, NET, tmp_path=tmp_path)
    with pytest.warns(UserWarning, match="plugin 'average'"):
        result = going_on(net, NET, tmp_path=tmp_path, on_missing_plugin="warn")
    assert int(result.state.step) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        going_on(net, NET, tmp_path=tmp_path / "ignored", on_missing_plugin="ignore")
    counting(tmp_path / "installed", "rng")
    with pytest.raises(
        CheckpointError, match=r"'rng' .* is not now: pip install fulgurite-rng, and add it"
    ):
        counting(tmp_path / "other", resume=tmp_path / "installed")


@pytest.mark.full
def test_new_plugin_is_an_error_or_starts_with_fresh_state(run: Path, tmp_path: Path) -> None:
    class Slice:
        plugin_name = "slice"
        instance: str | None = None

        @fg.hookimpl
        def init_plugin_state(self) -> Any:
            return jnp.full(2, 3.0)

    with pytest.raises(
        CheckpointError,
        match=r"plugin 'slice'.*was not when it was saved: leave it out with '-slice'",
    ):
        counting(tmp_path / "a", Slice(), resume=run)
    # '-slice:second' would be an error itself: an instance is not found by that.
    Slice.instance = "second"
    with pytest.raises(CheckpointError, match=r"was not when it was saved: leave it out\n"):
        counting(tmp_path / "c", Slice(), resume=run)
    Slice.instance = None
    result = counting(tmp_path / "b", Slice(), resume=run, on_missing_plugin="ignore")
    assert (
        result.state.plugin_states["slice"].tolist() == [3, 3] and float(result.module.weight) == -5
    )


def test_loggers_and_displays_may_be_added_and_removed(run: Path, tmp_path: Path) -> None:
    class Display:
        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None: ...

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [fg.ScheduledAction("show", fg.EverySeconds(1), lambda run: None)]

    counting(tmp_path, Display(), resume=run)


@pytest.mark.full
def test_added_or_removed_logger_is_reported(tmp_path: Path) -> None:
    messages: list[str] = []

    class Told:
        @fg.hookimpl
        def log_record(self, record: fg.Record) -> None:
            if record.kind != "text":
                return
            messages.append(record.values["message"])

    counting(tmp_path, Told(), "jsonl", steps=1)
    counting(tmp_path, Told(), "jsonl", steps=2, resume="auto")
    assert messages == []
    counting(tmp_path, Told(), "csv", steps=3, resume="auto")
    assert messages == [
        (
            "logger 'csv' was not active when the checkpoint was saved: it may lack earlier records, "
            "step 2"
        ),
        "logger 'jsonl' is gone, step 2",
    ]


@pytest.mark.full
def test_changed_static_leaves_are_reported(net: Any, tmp_path: Path) -> None:
    def dry(*, key: Any) -> Any:
        return eqx.nn.make_with_state(Net)(key=key, rate=0.25)

    with pytest.warns(UserWarning, match=r"not be exact.*p=0.5.*p=0.25"):
        going_on(net, dry, Average(), tmp_path=tmp_path)


@dataclass(frozen=True)
class Scaled:
    """Takes part in the step."""

    scale: float

    @fg.hookimpl
    def transform_batch(self, batch: Any) -> Any:
        return batch


@pytest.mark.full
def test_changed_arguments_plugins_and_data_are_reported(tmp_path: Path) -> None:
    def fit(scale: float, steps: int, data: Any) -> None:
        trainer = engine(
            tmp_path, Checkpointer(2, max_to_keep=steps), Scaled(scale), steps=steps, log_every=None
        )
        trainer.config = {"lr": scale, "steps": steps}
        trainer.fit(Counting, data, resume="auto")

    data = np.zeros((6, 1), np.float32)
    fit(0.5, 2, fg.ArrayData(data, 2))
    fit(0.5, 3, fg.ArrayData(data, 2))
    differ = (
        r"lr was 0.5 and is 0.25.*data was .ArrayData\(batch_size=2.*batch_size=3.*scaled: scale"
        r" was 0.5 and is 0.25"
    )
    with pytest.warns(UserWarning, match=differ) as warned:
        fit(0.25, 4, fg.ArrayData(data, 3))
    assert "steps" not in str(warned[0].message) and "keep was" not in str(warned[0].message)


# --- a part of a checkpoint -----------------------------------------------------------------------


class Old(Counting):
    """`encoder` is what later becomes a part of something else."""

    encoder: eqx.nn.Linear

    def __init__(self, *, key: Any) -> None:
        self.weight, self.encoder = jnp.zeros(()), eqx.nn.Linear(2, 3, key=key)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight + jnp.sum(self.encoder(jnp.ones(2)) ** 2))


class Decoder(eqx.Module):
    layers: list[eqx.nn.Linear]


class New(Old):
    """Has two layers like the old encoder."""

    decoder: Decoder

    def __init__(self, *, key: Any) -> None:
        super().__init__(key=key)
        self.decoder = Decoder(
            [eqx.nn.Linear(2, 3, key=jax.random.fold_in(key, n)) for n in range(2)]
        )


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, fg.FitResult]:
    path = tmp_path_factory.mktemp("old")
    return path, engine(path, Checkpointer(99), steps=2, seed=1).fit(Old, ZEROS)


def beginning(init_from: Any, model: Any = New, **settings: Any) -> fg.TrainState:
    """The state with which a fit begins."""
    observed: list[Any] = []
    look = Act(
        fg.AtStart(),
        lambda run: observed.append(
            jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, run.state)
        ),
    )
    engine(None, Reader(), look, **{"steps": 1, "seed": 5, **settings}).fit(
        model, ZEROS, init_from=init_from
    )
    return observed[0]


class Reader:
    """Restores, and writes nothing."""

    @fg.hookimpl
    def restore_checkpoint(
        self, resume: fg.CheckpointRef, template: fg.TrainState, engine: fg.Engine
    ) -> fg.Snapshot | None:
        return Checkpointer(1).restore_checkpoint(resume, template, engine, lambda _: None)


@pytest.mark.full
def test_part_of_another_model_is_restored(old: Any) -> None:
    path, result = old
    fresh = beginning(fg.CheckpointRef(path, map={"module.weight": "module.weight"}))
    state = beginning(fg.CheckpointRef(path, map={"module.decoder.layers[1]": "module.encoder"}))
    expected = get_arrays(fresh.module) | {
        ".weight": np.zeros((), np.float32),
        ".decoder.layers[1].weight": np.asarray(result.module.encoder.weight),
        ".decoder.layers[1].bias": np.asarray(result.module.encoder.bias),
    }
    got = get_arrays(state.module)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(got[name], array), name
    assert not np.array_equal(
        got[".decoder.layers[1].weight"], get_arrays(fresh.module)[".decoder.layers[1].weight"]
    )


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        (
            {"module.decoder.layers[2]": "module.encoder"},
            r"below 'module.decoder.layers\[2\]' in the new state",
        ),
        (
            {"module.decoder.layers[1]": "module.decoder"},
            r"below 'module.decoder' in .*There is: .*module.encoder",
        ),
        (
            {"module.decoder": "module.encoder"},
            r"(?s)differ.*module.decoder.layers\[0\].bias is only in the new state",
        ),
        ({"module.encoder": "module"}, r"(?s)differ.*module.encoder.bias is only in"),
        (
            {"module.weight": "module.encoder.bias"},
            r"module.weight, from module.encoder.bias: saved float32\[3\], wanted float32\[\]",
        ),
    ],
)
def test_a_path_that_matches_nothing_or_too_much_is_an_error(
    old: Any, mapping: Any, says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        beginning(fg.CheckpointRef(old[0], map=mapping))


def test_a_path_that_cannot_be_parsed_is_an_error_at_once() -> None:
    with pytest.raises(PathError, match="cannot read"):
        fg.CheckpointRef("runs/a", map={"module.[": "module"})


def test_non_strict_restore_takes_common_leaves(old: Any) -> None:
    path, result = old
    with pytest.warns(UserWarning, match="fits the model in part"):
        state = beginning(fg.CheckpointRef(path, map={"module": "module"}, strict=False))
    assert np.array_equal(state.module.encoder.weight, result.module.encoder.weight)
    assert float(state.module.weight) == float(result.module.weight) != 0


class Renamed(fg.Module):
    """`Old` with another name for its encoder, and a weight of another shape."""

    backbone: eqx.nn.Linear
    weight: jax.Array

    def __init__(self, *, width: int = 0, key: Any) -> None:
        self.backbone = eqx.nn.Linear(2, 3, key=key)
        self.weight = jnp.full((width,) if width else (), 7.0)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(self.weight.sum())

    configure_optimizers = Old.configure_optimizers


@pytest.mark.full
def test_what_a_non_strict_restore_leaves_is_listed(old: Any, tmp_path: Path) -> None:
    """A frozen part that was initialized at random trained without a word."""
    path, result = old
    reference = fg.CheckpointRef(path, strict=False)
    says = (
        r"(?s)step-2 fits the model in part: 1 of 3 arrays .*"
        r"module\.backbone\.weight: saved nothing, wanted float32\[3, 2\].*"
        r"module\.encoder\.weight: saved float32\[3, 2\], wanted nothing"
    )
    trainer = engine(tmp_path / "new", Checkpointer(9), steps=1)
    with pytest.warns(UserWarning, match=says):
        begun = trainer.fit(Renamed, ZEROS, init_from=reference)
    assert any(f"begins with arrays of {path}" in message for message in begun.messages)
    reader = engine(None, Reader(), steps=1)
    with pytest.warns(UserWarning, match=says):
        state = reader.load_weights(Renamed, reference)
    assert float(state.module.weight) == float(result.module.weight)


@pytest.mark.full
def test_a_non_strict_restore_leaves_arrays_of_another_shape(old: Any) -> None:
    path, result = old
    build = partial(Renamed, width=4)
    renamed = fg.CheckpointRef(
        path,
        map={"module.backbone": "module.encoder", "module.weight": "module.weight"},
        strict=False,
    )
    says = r"(?s)2 of 3 arrays .*module\.weight: saved float32\[\], wanted float32\[4\]"
    with pytest.warns(UserWarning, match=says):
        state = beginning(renamed, build)
    assert np.array_equal(state.module.backbone.weight, result.module.encoder.weight)
    assert state.module.weight.tolist() == [7, 7, 7, 7]
    with pytest.raises(CheckpointError, match=r"(?s)wanted float32\[4\].*strict=False"):
        beginning(replace(renamed, strict=True), build)
    nothing = fg.CheckpointRef(path, map={"module.weight": "module.weight"}, strict=False)
    with pytest.raises(CheckpointError, match=r"nothing of .* fits the model"):
        beginning(nothing, build)


def test_non_strict_restore_of_nothing_is_an_error(old: Any) -> None:
    reference = fg.CheckpointRef(old[0], map={"module.weight": "module.encoder"}, strict=False)
    says = r"no array in common\. Only in the new state: module\.weight; only in the checkpoint: module\.e"
    with pytest.raises(CheckpointError, match=says):
        beginning(reference)


def test_optimizer_state_is_initialized_from_the_loaded_weights(old: Any) -> None:
    class Keeping(Old):
        def configure_optimizers(self) -> optax.GradientTransformation:
            start = optax.GradientTransformation(
                lambda params: {"start": params},
                lambda updates, state, params=None: (updates, state),
            )
            return optax.chain(start, optax.sgd(1.0))

    path, result = old
    state = beginning(path, Keeping)
    loaded = [
        leaf for leaf in jax.tree.leaves(state.opt_state) if getattr(leaf, "shape", None) == (3, 2)
    ]
    assert np.array_equal(state.module.encoder.weight, result.module.encoder.weight)
    assert len(loaded) == 1 and np.array_equal(loaded[0], result.module.encoder.weight)
    assert int(state.step) == 0


@pytest.mark.full
def test_optimizer_arrays_can_be_loaded_too(net: Any) -> None:
    path, result = net
    observed: list[Any] = []
    look = Act(
        fg.AtStart(),
        lambda run: observed.append(
            get_arrays((run.state.module, run.state.opt_state, run.state.step))
        ),
    )
    names = ("module", "model_state", "opt_state")
    init_from = fg.CheckpointRef(path, map={name: name for name in names})
    engine(None, Reader(), Average(), look, steps=1, seed=9).fit(
        NET, regression(), init_from=init_from
    )
    expected = get_arrays((result.module, result.state.opt_state, jnp.int32(0)))
    assert {name: array.tobytes() for name, array in observed[0].items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


def test_a_state_and_weights_to_begin_with_exclude_each_other(old: Any) -> None:
    with pytest.raises(ConfigurationError, match="not both"):
        engine(None, Reader(), steps=1).fit(data=ZEROS, state=old[1].state, init_from=old[0])


# --- other devices --------------------------------------------------------------------------------


@pytest.mark.slow  # tests/integration/test_elastic.py has fewer devices in the suite
def test_run_resumes_with_another_number_of_devices(tmp_path: Path) -> None:
    """Trained on four simulated devices, resumed with two and with one; the same numbers but
    for rounding."""
    program = Path(__file__).with_name("elastic.py")
    weights = []
    for number, devices in enumerate((4, 2, 1)):
        done = subprocess.run(
            [sys.executable, str(program), str(tmp_path / "run"), str(devices), str(2 * number + 2)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        weights.append(json.loads(done.stdout.splitlines()[-1]))
    whole = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "whole"), "1", "6"],
        capture_output=True,
        text=True,
        check=True,
    )
    np.testing.assert_allclose(
        weights[-1], json.loads(whole.stdout.splitlines()[-1]), rtol=1e-4, atol=1e-6
    )


def test_a_checkpoint_is_named_by_a_path_and_paths() -> None:
    with pytest.raises(ConfigurationError, match="^int is given .* path must be that of a run"):
        fg.CheckpointRef(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="map is str; it must be a dictionary"):
        fg.CheckpointRef("run", map="module")  # type: ignore[arg-type]
    trainer = engine(None, Checkpointer(1), steps=1)
    with pytest.raises(ConfigurationError, match="^Counting is given where a checkpoint is meant"):
        trainer.fit(Counting, ZEROS, init_from=Counting())  # type: ignore[arg-type]


class Standardized(fg.Module):
    """A layer with batch statistics, under a name of choice, and a weight beside it."""

    layers: dict[str, Any]
    weight: jax.Array

    def __init__(self, name: str, *, key: Any = None) -> None:
        self.layers = {name: eqx.nn.BatchNorm(3, "batch", mode="batch")}
        self.weight = jnp.ones(3)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        (layer,) = self.layers.values()
        apply = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        values, state = apply(batch, ctx.model_state)
        return fg.Output(((values @ self.weight) ** 2).mean(), model_state=state)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.0)


@pytest.mark.full
def test_model_state_comes_with_the_modules_that_a_map_names(tmp_path: Path) -> None:
    """Batch statistics that stayed fresh made a fine-tuned model worthless, and nobody said so."""
    batches = [np.random.default_rng(0).normal(5, 2, (16, 3)).astype(np.float32)]
    build_old = eqx.nn.make_with_state(partial(Standardized, "encoder"))
    build_new = eqx.nn.make_with_state(partial(Standardized, "backbone"))
    old = engine(tmp_path, Checkpointer(3), steps=3).fit(build_old, batches)

    def begin(**options: Any) -> fg.FitResult:
        reference = fg.CheckpointRef(tmp_path, **options)
        # The rate of the optimizer is 0, so that one more step changes the statistics alone.
        return engine(None, Reader(), steps=1).fit(build_new, batches, init_from=reference)

    mapped = begin(map={"module.layers.backbone": "module.layers.encoder"})
    assert mapped.model_state is not None
    index = mapped.module.layers["backbone"].batch_counter
    assert int(mapped.model_state.get(index)) == 3 + 1
    again = engine(None, Reader(), steps=4).fit(build_old, batches)
    first, second = (list(get_arrays(fit.model_state).values()) for fit in (mapped, again))
    assert all(map(np.array_equal, first, second))
    assert old.model_state is not None
    # Who names model state decides about it.
    chosen = {"module.layers.backbone": "module.layers.encoder", "model_state": "model_state"}
    with pytest.raises(CheckpointError, match="'model_state' and 'model_state' differ"):
        begin(map=chosen)


class Plain(Standardized):
    """The same, without statistics."""

    def __init__(self, *, key: Any = None) -> None:
        self.layers = {"encoder": eqx.nn.LayerNorm(3)}
        self.weight = jnp.ones(3)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        return fg.Output(((jax.vmap(self.layers["encoder"])(batch) @ self.weight) ** 2).mean())


@pytest.mark.full
def test_mapped_modules_without_their_state_are_named(tmp_path: Path) -> None:
    batches = [np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)]
    engine(tmp_path, Checkpointer(1), steps=1).fit(Plain, batches)
    build = eqx.nn.make_with_state(partial(Standardized, "backbone"))

    def begin(target: str, source: str, strict: bool) -> fg.FitResult:
        reference = fg.CheckpointRef(tmp_path, map={target: source}, strict=strict)
        return engine(None, Reader(), steps=1).fit(build, batches, init_from=reference)

    # A weight alone has no statistics.
    begin("module.layers.backbone.weight", "module.layers.encoder.weight", strict=True)
    layers = ("module.layers.backbone", "module.layers.encoder")
    with pytest.raises(CheckpointError, match="has model state, such as batch statistics, and"):
        begin(*layers, strict=True)
    with pytest.warns(UserWarning, match="has none: it stays as it is initialized"):
        begin(*layers, strict=False)
