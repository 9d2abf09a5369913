# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "equinox",
#     "fulgurite",
#     "fulgurite-evaluators",
#     "fulgurite-progress",
#     "jax",
#     "matplotlib",
#     "numpy",
#     "optax",
#     "scikit-learn",
# ]
#
# [tool.uv.sources]
# fulgurite = { path = "../core", editable = true }
# fulgurite-evaluators = { path = "../plugins/evaluators", editable = true }
# fulgurite-progress = { path = "../plugins/progress", editable = true }
# ///
# %% [markdown]
# # A first model in a notebook
#
# Each cell begins with `# %%`: VS Code, PyCharm and jupytext open this file as a notebook.

# %%
import equinox as eqx
import fulgurite as fg
import jax
import numpy as np
import optax
from fulgurite_evaluators import Evaluator
from fulgurite_progress import timing_table

try:
    import matplotlib.figure  # noqa: F401 (for `plot`)
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is not installed. Start this example with `uv run examples/notebook.py`, "
        "which installs what is listed at its top."
    ) from None


# %%
class Classifier(fg.Module):
    """A perceptron."""

    net: eqx.nn.MLP

    def __init__(self, *, key: jax.Array) -> None:
        self.net = eqx.nn.MLP(in_size=64, out_size=10, width_size=64, depth=1, key=key)

    def training_step(self, batch: dict[str, jax.Array], ctx: fg.Context) -> fg.Output:
        """Return the loss and the accuracy of a batch."""
        logits = jax.vmap(self.net)(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = fg.metrics.Accuracy.from_logits(logits, batch["label"])
        return fg.Output(losses.mean(), metrics={"accuracy": accuracy})

    def configure_optimizers(self) -> optax.GradientTransformation:
        """Return Adam."""
        return optax.adam(1e-3)


# %%
pixels, labels = map(np.asarray, load_digits(return_X_y=True))
images = pixels.astype(np.float32) / 16
train = fg.ArrayData(
    {"image": images[360:], "label": labels[360:]}, batch_size=64, shuffle=True, remainder="drop"
)
test = fg.ArrayData({"image": images[:360], "label": labels[:360]}, batch_size=120)

# %%
engine = fg.Engine(steps=400, log_every=50, plugins=[Evaluator("test", test, every=100)])
result = engine.fit(Classifier, train)

# %% [markdown]
# The value of a cell's last line is shown: curves, tables, numbers.

# %%
result.history.plot("train/loss", "test/accuracy")

# %%
result.history.to_dict()["test/accuracy"]

# %%
timing_table(result.timings)

# %%
# Run the cell again to continue from where it ended.
result = engine.fit(data=train, state=result.state, steps=100)
engine.evaluate(result, test)
