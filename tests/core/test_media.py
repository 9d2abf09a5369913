"""Media of a step: made only at the steps that show them, and the same numbers as NumPy's."""

from dataclasses import dataclass, field
from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fulgurite.errors import ModelError
from fulgurite_logging import media
from models import Linear, regression


@dataclass(frozen=True, eq=False)
class Show:
    """Shows media at a trigger and keeps the records; called `media`."""

    trigger: fg.Trigger | int
    records: list[fg.Record] = field(default_factory=list)
    plugin_name = "media"

    @fg.hookimpl
    def register_actions(self) -> list[fg.ScheduledAction]:
        return [fg.ScheduledAction("show", self.trigger, fg.Run.emit_media)]

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "media":
            return
        self.records.append(record)


class Showing(Linear):
    """Counts on the host how often its media are made when the step runs."""

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        def histogram() -> media.Histogram:
            jax.debug.callback(MADE.append, ctx.step)
            return media.Histogram.from_values({"weight": self.weight}, bins=4)

        output = super().training_step(batch, ctx)
        return output.replace(
            media={"weight": histogram, "x": media.Images.from_pixels(batch["x"]), "note": NOTE}
        )


MADE: list[Any] = []
GIVEN: list[Any] = []
NOTE = media.Text("a note")


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.full)])
def test_media_are_rendered_only_at_their_trigger(steps_per_execution: int):
    MADE.clear()
    show, batches = Show(5), list(regression(40, 4))
    engine = fg.Engine(
        steps=10,
        plugins=[show],
        autoload=False,
        steps_per_execution=steps_per_execution,
        log_every=2,
    )
    result = engine.fit(Showing, fg.DataSource(batches))
    jax.effects_barrier()
    assert sorted(int(step) for step in MADE) == [4, 9]
    assert [
        (record.kind, record.source, record.step, record.stream) for record in show.records
    ] == [
        ("media", "train", 5, "exact"),
        ("media", "train", 10, "exact"),
    ]
    for step, record in zip((5, 10), show.records, strict=True):
        weight = np.asarray(
            fg.Engine(steps=step - 1, autoload=False)
            .fit(Showing, fg.DataSource(batches))
            .module.weight
        )
        counts, edges = np.histogram(weight, 4)
        assert isinstance(record.values["weight"].counts, np.ndarray)
        np.testing.assert_array_equal(record.values["weight"].counts, counts)
        np.testing.assert_allclose(record.values["weight"].edges, edges, rtol=1e-5)
        pixels = np.round(255 * np.clip(batches[step - 1]["x"], 0, 1)).astype(np.uint8)
        np.testing.assert_array_equal(record.values["x"].pixels, pixels[None, :, :, None])
        assert record.values["note"] == NOTE
    assert not result.failures


@dataclass(frozen=True)
class Gradients:
    """Shows the gradients of a step, and measures one."""

    plugin_name = "gradients"

    @fg.hookimpl
    def step_metrics(self, grads: Any) -> dict[str, Any]:
        return {
            "first": media.Histogram.from_values(grads.weight[:1], bins=1),
            "weight": lambda: media.Histogram.from_values(grads.weight, bins=4),
            "norm": jnp.abs(grads.weight[0]),
        }


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(2, marks=pytest.mark.full)])
def test_plugins_show_media_of_what_is_there_after_the_update(steps_per_execution: int):
    show = Show(2)
    engine = fg.Engine(
        steps=4,
        plugins=[show, Gradients()],
        autoload=False,
        steps_per_execution=steps_per_execution,
        log_every=1,
    )
    result = engine.fit(Linear, regression(40, 4))
    norms = result.history["train/gradients/norm"]
    assert [record.step for record in show.records] == [2, 4]
    for record in show.records:
        values = record.values
        assert values.keys() == {"gradients/first", "gradients/weight"}
        middle = values["gradients/first"].edges.mean()  # of the bin around the only number
        assert abs(middle) == pytest.approx(norms[record.step - 1], abs=1e-6)
        assert values["gradients/weight"].counts.sum() == 3
    assert "gradients/weight" not in result.metrics["train"]


@pytest.mark.full
def test_an_evaluation_shows_the_media_of_its_first_batch():
    MADE.clear()

    @dataclass(frozen=True, eq=False)
    class Evaluating(Show):
        @fg.hookimpl
        def register_evaluations(self) -> list[fg.Evaluation]:
            return [fg.Evaluation("test", regression(12, 4))]

        @fg.hookimpl
        def register_actions(self) -> list[fg.ScheduledAction]:
            return [
                *super().register_actions(),
                fg.ScheduledAction("evaluate", fg.At(2), self.evaluate, "evaluate"),
            ]

        def evaluate(self, run: fg.Run) -> None:
            run.evaluate("test")

    show = Evaluating(fg.At(4))
    result = fg.Engine(steps=4, plugins=[show], autoload=False).fit(Showing, regression(40, 4))
    jax.effects_barrier()
    assert len(MADE) == 2  # of the three batches of the evaluation one, and one step
    assert [(record.source, record.step, record.stream) for record in show.records] == [
        ("test", 2, "exact"),
        ("train", 4, "exact"),
    ]
    pixels = np.round(255 * np.clip(next(iter(regression(12, 4)))["x"], 0, 1)).astype(np.uint8)
    np.testing.assert_array_equal(show.records[0].values["x"].pixels, pixels[None, :, :, None])
    assert set(result.metrics["test"]) == {"loss", "error"}


def test_evaluation_metric_that_is_not_a_number_is_an_error_naming_it():
    engine = fg.Engine(steps=2, autoload=False)
    with pytest.raises(ModelError, match="metric 'note' is Text"):
        engine.evaluate(
            engine.fit(Linear, regression(40, 4)),
            regression(8, 4),
            metrics={"note": lambda p, b: NOTE},
        )


def test_media_are_not_rendered_without_a_plugin_that_shows_them():
    MADE.clear()
    engine = fg.Engine(steps=5, autoload=False)
    engine.fit(Showing, fg.DataSource(regression(20, 4)))
    jax.effects_barrier()
    assert MADE == []


@pytest.mark.full
def test_media_do_not_change_the_training():
    batches = regression(40, 4)
    shown = fg.Engine(steps=10, plugins=[Show(3)], autoload=False).fit(
        Showing, fg.DataSource(batches)
    )
    plain = fg.Engine(steps=10, autoload=False).fit(Linear, fg.DataSource(batches))
    np.testing.assert_array_equal(shown.module.weight, plain.module.weight)


@pytest.mark.full
def test_histogram_omits_nonfinite_values():
    histogram = media.Histogram.from_values(
        [jnp.array([0.0, 1.0, jnp.nan, 2.0]), jnp.array([jnp.inf, 4.0])], bins=2
    )
    assert histogram.counts.tolist() == [2, 2] and histogram.edges.tolist() == [0, 2, 4]
    tree = {"a": np.array([0, 1]), "f": jnp.tanh, "key": jax.random.key(0), "n": 7}
    assert media.Histogram.from_values(tree, bins=2).counts.tolist() == [1, 1]
    with pytest.raises(ModelError, match="no array of numbers in dict"):
        media.Histogram.from_values({})
    empty = media.Histogram.from_values(jnp.array([jnp.nan]), bins=2)
    assert empty.counts.tolist() == [0, 0] and np.isfinite(empty.edges).all()


@pytest.mark.parametrize(
    "shape, expected", [((2, 3), (1, 2, 3, 1)), ((2, 3, 4), (1, 2, 3, 4)), ((5, 2, 3, 3),) * 2]
)
def test_pictures_of_every_rank(shape: tuple[int, ...], expected: tuple[int, ...]):
    pixels = media.Images.from_pixels(jnp.full(shape, 2.0)).pixels
    assert pixels.shape == expected and pixels.dtype == jnp.uint8 and (pixels == 255).all()


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_figure_may_be_drawn_by_a_local_function(steps_per_execution: int):
    class Drawing(Linear):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            def figure() -> media.Figure:
                return media.Figure(lambda values: values.tolist(), batch["x"][0])

            return super().training_step(batch, ctx).replace(media={"figure": figure})

    show, batches = Show(2), list(regression(40, 4))
    fg.Engine(steps=4, plugins=[show], autoload=False, steps_per_execution=steps_per_execution).fit(
        Drawing, fg.DataSource(batches)
    )
    drawn = [
        record.values["figure"].draw(record.values["figure"].values) for record in show.records
    ]
    assert drawn == [batches[step - 1]["x"][0].tolist() for step in (2, 4)]


def test_single_image_is_accepted():
    assert media.Image.from_pixels(jnp.zeros((2, 3))).pixels.shape == (2, 3, 1)
    assert media.Image.from_pixels(jnp.zeros((2, 3, 4))).pixels.shape == (2, 3, 4)
    with pytest.raises(ModelError, match=r"\(1, 2, 3, 3\) are several pictures"):
        media.Image.from_pixels(jnp.zeros((1, 2, 3, 3)))


def test_invalid_media_are_errors_naming_them():
    with pytest.raises(ModelError, match=r"shape \(2, 3, 5\) is not a picture"):
        media.Images.from_pixels(jnp.zeros((2, 3, 5)))
    with pytest.raises(ModelError, match="pixels are int32; give uint8"):
        media.Images.from_pixels(jnp.zeros((2, 3), jnp.int32))

    class Wrong(Linear):
        def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return super().training_step(batch, ctx).replace(media={"x": GIVEN[-1]})

    for value, kind in (
        (lambda: jnp.zeros(3), "JitTracer|DynamicJaxprTracer"),
        ([NOTE], "list"),
    ):
        GIVEN.append(value)
        with pytest.raises(
            ModelError, match=f"media 'x' is ({kind}); give a type of fulgurite_logging.media"
        ):
            fg.Engine(steps=2, plugins=[Show(1)], autoload=False).fit(
                Wrong, fg.DataSource(regression(20, 4))
            )
