"""What an evaluator shows of its first batch, by functions of its own."""

from typing import Any

import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fulgurite.errors import ConfigurationError, ModelError
from fulgurite_evaluators import Evaluator
from fulgurite_logging import MediaLogger, media


class Scale(fg.Module):
    """Multiplies pictures by a number, and shows the first one of a batch."""

    factor: jax.Array

    def __init__(self, *, key: Any) -> None:
        self.factor = jnp.array(0.5)

    def training_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
        preds = self.factor * batch
        return fg.Output(
            fg.metrics.Mean.from_values(preds, ctx.mask),
            media={"step": lambda: media.Image.from_pixels(preds[0])},
            preds=preds,
        )

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


class Recorder:
    def __init__(self) -> None:
        self.records: list[fg.Record] = []

    @fg.hookimpl
    def log_record(self, record: fg.Record) -> None:
        if record.kind != "media":
            return
        self.records.append(record)


class Negative:
    """Shows all pictures of a batch as negatives, those of padding white."""

    def __call__(self, preds: Any, batch: Any, mask: Any = None) -> fg.Media:
        del batch
        shown = jnp.where(mask[:, None, None], 1 - preds, 1)
        return media.Images.from_pixels(shown[..., None])


def show_second(preds: Any, batch: Any) -> fg.Media:
    return media.Image.from_pixels(jnp.concatenate([batch[1], preds[1]]))


@pytest.mark.full
def test_an_evaluator_shows_its_own_summaries_of_its_first_batch_only() -> None:
    pictures = np.random.default_rng(0).random((5, 2, 3)).astype(np.float32)
    data = fg.ArrayData(pictures, 3, remainder="pad")
    few = fg.ArrayData(pictures[:2], 3, remainder="pad")
    summaries = {"second": show_second, "negative": Negative()}
    recorder = Recorder()
    plugins = [
        Evaluator("own", few, every=2, summaries=summaries),
        Evaluator("none", data, every=2, summaries={}),
        Evaluator("plain", data, every=2),
        recorder,
    ]
    result = fg.Engine(steps=2, plugins=plugins, autoload=False).fit(Scale, data)
    assert [record.source for record in recorder.records] == ["own"]  # no plugin shows the others
    (record,) = recorder.records
    assert record.step == 2 and set(record.values) == {"second", "negative"}
    expected = np.concatenate([pictures[1], pictures[1] * np.float32(0.5)])
    np.testing.assert_allclose(record.values["second"].pixels[..., 0], expected * 255, atol=0.51)
    negative = np.asarray(record.values["negative"].pixels)[..., 0]
    np.testing.assert_allclose(negative[:2], (1 - pictures[:2] / 2) * 255, atol=0.51)
    np.testing.assert_array_equal(negative[2], 255)
    # Metrics are those of an evaluation without summaries.
    assert result.metrics["own"]["loss"] == pytest.approx(pictures[:2].mean() / 2, rel=1e-6)

    recorder.records.clear()
    fg.Engine(steps=2, plugins=[*plugins, MediaLogger(every=2)], autoload=False).fit(Scale, data)
    shown = {record.source: set(record.values) for record in recorder.records}
    assert shown == {"own": {"second", "negative"}, "plain": {"step"}, "train": {"step"}}


def test_an_evaluation_of_the_same_name_without_summaries_takes_none_away() -> None:
    pictures = np.ones((2, 2, 3), np.float32)
    recorder = Recorder()
    evaluator = Evaluator("test", [pictures], every=1, summaries={"second": show_second})
    engine = fg.Engine(steps=1, plugins=[evaluator, recorder], autoload=False)
    engine.evaluate(Scale(key=None), [pictures])
    engine.fit(Scale, [pictures])
    assert [(record.source, list(record.values)) for record in recorder.records] == [
        ("test", ["second"])
    ]


def test_summaries_that_show_nothing_are_refused() -> None:
    data = fg.ArrayData(np.ones((2, 2, 3), np.float32), 2)

    class Silent(Scale):
        def validation_step(self, batch: Any, ctx: fg.Context) -> fg.Output:
            return fg.Output(jnp.mean(batch))

    def evaluate(model: Any, **settings: Any) -> None:
        plugins = [Evaluator("test", data, **settings)]
        fg.Engine(steps=1, plugins=plugins, autoload=False).fit(model, data)

    with pytest.raises(ModelError, match="media 'a' is .*; give a type of fulgurite_logging.media"):
        evaluate(Scale, summaries={"a": lambda preds, batch: preds})
    with pytest.raises(ModelError, match=r"'test' has .*summaries of its own.*Output\(\.\.\., pre"):
        evaluate(Silent, summaries={"a": show_second})
    with pytest.raises(ConfigurationError, match="summaries must be a dictionary of functions"):
        evaluate(Scale, summaries=[show_second])
    with pytest.raises(ConfigurationError, match="summaries are of an evaluation of the module"):
        evaluate(Scale, summaries={"a": show_second}, fn=lambda state, step: {})
