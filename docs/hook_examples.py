"""A short implementation of every hook. `hooks.md` shows them, and a test trains with them."""

import json
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fulgurite.errors import CheckpointError
from fulgurite.plugins import is_array_like, map_to_paths
from fulgurite_sharding import MeshStrategy
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


class DivideBatches(MeshStrategy):
    """Divide each batch over all devices and keep everything else whole on each."""

    def get_state_shardings(self, state):
        return jax.tree.map(lambda leaf: self.replicated, state)

    def get_batch_shardings(self, batch):
        return jax.tree.map(lambda leaf: NamedSharding(self.mesh, P("data")), batch)

    def get_param_shardings(
        self, module
    ):  # whole in the forward pass, also if the state divides them
        return jax.tree.map(lambda leaf: self.replicated if eqx.is_array(leaf) else None, module)

    def get_output_shardings(self, output):  # predictions stay divided as the batch is
        shardings = jax.tree.map(lambda leaf: None, output)
        return shardings.replace(preds=NamedSharding(self.mesh, P("data")))


class DataParallel:
    """Train on all devices of this process; several processes need a `ProcessSync` as well."""

    @fg.hookimpl
    def sharding_strategy(self):
        return DivideBatches(Mesh(np.array(jax.devices()), ("data",)))


class Noise:
    """Add noise to the training batches, from a random stream of its own."""

    @fg.hookimpl
    def register_rng_streams(self):
        return [fg.RngStream("noise", train=True)]

    @fg.hookimpl
    def transform_batch(self, batch, ctx):
        noise = jax.random.normal(ctx.key("noise"), batch["x"].shape)
        return {**batch, "x": batch["x"] + 0.01 * noise}


class Recipe:
    """Train any module with Adam and clipped gradients, instead of the optimizer that it defines."""

    @fg.hookimpl
    def configure_optimizers(self, module):
        return {"default": fg.OptimizerSpec(optax.adam(0.1))}

    @fg.hookimpl
    def gradient_transform(self, module, optimizer):
        return optax.clip_by_global_norm(1.0)

    @fg.hookimpl
    def make_update_rule(self, module, optimizers):  # what the core does by itself
        return fg.GradientUpdate(optimizers["default"])


class SmallStart:
    """Begin with weights of half the size."""

    @fg.hookimpl
    def transform_module(self, module):
        params, rest = eqx.partition(module, eqx.is_inexact_array)
        return eqx.combine(jax.tree.map(lambda leaf: leaf / 2, params), rest)


class Bounded(fg.UpdateRule):
    """Wrap another rule and keep the parameters between -10 and 10."""

    def __init__(self, update_rule):
        self.update_rule = update_rule

    def init(self, module):
        return self.update_rule.init(module)

    def __call__(self, forward, state, batch, ctx):
        state, output = self.update_rule(forward, state, batch, ctx)
        params, rest = eqx.partition(state.module, eqx.is_inexact_array)
        module = eqx.combine(jax.tree.map(lambda leaf: jnp.clip(leaf, -10, 10), params), rest)
        return state.replace(module=module), output


class Bounds:
    """Wrap the update rule, whichever it is."""

    @fg.hookimpl
    def wrap_update_rule(self, module, update_rule):
        return Bounded(update_rule)


class Averaged:
    """Keep a moving average of the weights on the device; it can be evaluated as `averaged`."""

    @fg.hookimpl
    def init_plugin_state(self, module, key):
        return eqx.filter(module, eqx.is_inexact_array)

    @fg.hookimpl
    def plugin_state_sharding(self, plugin_state, mesh):
        return jax.tree.map(lambda leaf: NamedSharding(mesh, P()), plugin_state)

    @fg.hookimpl
    def after_update(self, module, plugin_state, ctx):
        weights = eqx.filter(module, eqx.is_inexact_array)
        return module, jax.tree.map(
            lambda mean, new: 0.99 * mean + 0.01 * new, plugin_state, weights
        )

    @fg.hookimpl
    def after_finalize(self, module, plugin_state):
        return self.after_update(module, plugin_state, None)

    @fg.hookimpl
    def module_views(self, state):
        return {"averaged": eqx.combine(state.plugin_states["averaged"], state.module)}


class WeightDecay:
    """Add the squared weights to the loss, and log the norm of the gradients."""

    @fg.hookimpl
    def loss_terms(self, module, output, batch, ctx):
        return {
            "l2": 1e-4 * optax.tree.norm(eqx.filter(module, eqx.is_inexact_array), squared=True)
        }

    @fg.hookimpl
    def step_metrics(self, state, output, grads, updates, batch, ctx):
        return {"gradients": fg.metrics.Mean.from_values(optax.tree.norm(grads))}


class HalfPrecision:
    """Trains the module in bfloat16, and measures the largest input of evaluations."""

    @fg.hookimpl
    def around_forward(self, call, module, batch, ctx):
        if not ctx.training:
            return call(module, batch)
        half = jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, module
        )
        output = call(half, batch)
        return output.replace(loss=output.loss.astype(jnp.float32))

    @fg.hookimpl
    def evaluation_metrics(self, module, output, batch, ctx):
        examples = jax.tree.leaves(batch)[0]
        return {"largest": fg.metrics.Max.from_values(jnp.max(jnp.abs(examples)))}


class Diary:
    """Note what happens in a run."""

    def __init__(self):
        self.notes = []

    @fg.hookimpl
    @contextmanager
    def around_fit(self, timings):
        self.notes.append(f"doing: {timings.active_names}")
        yield
        self.notes.append(f"{timings.seconds['start']:.1f} s to start")

    @fg.hookimpl
    @contextmanager
    def fit_context(self, run):
        self.notes.append("entered")
        yield
        self.notes.append("left")

    @fg.hookimpl
    def on_fit_start(self, run):
        self.notes.append(f"begins at step {run.step}")
        run.log_text("diary", {"message": "begun"}, stream="telemetry")

    @fg.hookimpl
    def on_epoch_end(self, run, epoch):
        self.notes.append(f"epoch {epoch} ended at step {run.step}")

    @fg.hookimpl
    def on_replace_state(self, run):
        self.notes.append(f"another state from step {run.step} on")

    @fg.hookimpl
    def on_evaluate_end(self, run, source, metrics):
        self.notes.append(f"{source}: {metrics['loss']}")

    @fg.hookimpl
    def on_compile(self, run, name, batch_spec, compiled, jaxpr, lowered):
        assert "stablehlo" in lowered.as_text()
        memory = compiled.memory_analysis().temp_size_in_bytes
        self.notes.append(f"{name}: {len(jaxpr.eqns)} operations, {memory} bytes for {batch_spec}")

    @fg.hookimpl
    def on_save(self, run, step):
        self.notes.append(f"saves step {step}")

    @fg.hookimpl
    def on_restore(self, run, step):
        self.notes.append(f"resumes from step {step}")

    @fg.hookimpl
    def on_exception(self, run, exception):
        self.notes.append(f"failed at step {run.step}: {exception}")

    @fg.hookimpl
    def on_fit_end(self, run, result):
        self.notes.append(f"ended: {result.stop_reason or 'as planned'}")


class Patience:
    """Evaluate, and stop when the loss has not improved three times. The count is saved in
    checkpoints."""

    best = fg.PerFit(lambda: float("inf"))  # the same instance may take part in several fits
    num_failed = fg.PerFit(int)

    def __init__(self, data, every):
        self.data = data
        self.every = every

    @fg.hookimpl
    def register_evaluations(self):
        return [fg.Evaluation("validation", self.data)]

    @fg.hookimpl
    def register_actions(self):
        return [fg.ScheduledAction("look", self.every, self.look, stage="evaluate")]

    def look(self, run):
        loss = run.evaluate("validation")["loss"]
        if loss < self.best:
            self.best = loss
            self.num_failed = 0
        else:
            self.num_failed += 1
        return fg.StopTraining("the loss no longer improves") if self.num_failed == 3 else None

    @fg.hookimpl
    def get_host_state(self):
        return {"best": self.best, "num_failed": self.num_failed}

    @fg.hookimpl
    def set_host_state(self, state, version):
        self.best = state["best"]
        self.num_failed = state["num_failed"]


class Lines:
    """Write exact records to a file, each once. (`FileLogger` does this in a thread of its
    own.)"""

    def __init__(self, path):
        self.path = Path(path)
        self.position = 0

    @fg.hookimpl
    def check_logger_position(self, position):
        if self.path.stat().st_size < position:
            raise CheckpointError(f"{self.path} lacks lines: put the file back")

    @fg.hookimpl
    def rewind_logger(self, position):  # saved in the checkpoint; called before open_logger
        self.position = position

    @fg.hookimpl
    def open_logger(self, run):
        self.file = self.path.open("a")
        self.file.truncate(self.position)
        self.file.seek(self.position)  # which `truncate` does not do

    @fg.hookimpl
    def log_record(self, record):
        if record.kind == "scalars" and record.stream == "exact":
            self.file.write(f"{record.step} {record.source} {record.values}\n")

    @fg.hookimpl
    def flush_logger(self, step):
        self.file.flush()
        done = Future()
        done.set_result(self.file.tell())
        return done

    @fg.hookimpl
    def close_logger(self):
        self.file.close()


class InMemory:
    """Keep the newest snapshot in memory. (`fulgurite-checkpoint` writes to disk.)"""

    def __init__(self):
        self.saved = None

    @fg.hookimpl
    def save_checkpoint(self, run):
        hooks = run.engine.plugins.hooks
        hooks.on_save.call(run.step, run=run, step=run.step)
        positions = {
            logger.name: future.result()
            for logger, future in hooks.flush_logger.each(run.step, step=run.step)
        }
        self.saved = _copy_snapshot(run.snapshot()), json.dumps(positions)

    @fg.hookimpl
    def restore_checkpoint(self, resume, template, engine):
        if self.saved is None:
            return None
        snapshot, positions = self.saved
        step = int(snapshot.state.step)
        positions = json.loads(positions)
        engine.plugins.hooks.check_logger_position.each(
            step,
            per_plugin=lambda logger: {"position": positions[logger.name]},
            step=step,
            engine=engine,
        )
        return _copy_snapshot(snapshot)

    @fg.hookimpl
    def on_restore(self, run, step):
        positions = json.loads(self.saved[1])
        run.engine.plugins.hooks.rewind_logger.each(
            step, per_plugin=lambda logger: {"position": positions[logger.name]}
        )


class FromNumpy:
    """Let `init_from=` and `weights=` take a file of `np.savez` whose names are paths."""

    @fg.hookimpl
    def read_weights(self, source, module, engine):
        if not str(source.path).endswith(".npz"):
            return None  # a checkpoint, or what another plugin reads
        with np.load(source.path) as arrays:  # which reads no pickle
            return jax.tree.map(
                lambda leaf, path: jnp.asarray(arrays[path]) if is_array_like(leaf) else leaf,
                module,
                map_to_paths(module),
            )


def _copy_snapshot(snapshot):
    """Copy the arrays: training reuses their memory."""
    state = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, snapshot.state)
    return replace(snapshot, state=state)
