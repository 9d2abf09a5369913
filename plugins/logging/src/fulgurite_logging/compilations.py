"""Record what was compiled, and why it was compiled again."""

from dataclasses import dataclass
from typing import Any

import fulgurite as fg
import jax
from fulgurite.plugins import count_flops, leaves_with_paths
from jax.extend.core import ClosedJaxpr


@dataclass(eq=False)
class CompilationMonitor:
    """Emit a record for each executable that a fit compiles, as telemetry.

    It holds `flops`, counted from the traced program for all devices together, the memory that one
    device needs and the bytes that it moves, as XLA estimates them, and, if the executable is not
    the first of its name, a string that says what changed in the batch.

    Example:
        from fulgurite_logging import CompilationMonitor

        engine = fg.Engine(steps=100, plugins=[CompilationMonitor(), "console"])
    """

    _specs = fg.PerFit[dict[str, dict[str, str]]](dict)

    @fg.hookimpl
    def on_compile(
        self,
        run: fg.Run | None,
        name: str,
        batch_spec: Any,
        compiled: jax.stages.Compiled,
        jaxpr: ClosedJaxpr,
    ) -> None:
        """Emit the records.

        Args:
            run: the run.
            name: of the program.
            batch_spec: the shapes of its batch.
            compiled: the executable.
            jaxpr: the program as it was traced.
        """
        spec = {
            path or "batch": f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in leaves_with_paths(batch_spec)
        }
        previous = self._specs.get(name)
        self._specs[name] = spec
        if run is None:
            return
        run.log_scalars(f"compilation/{name}", _estimate_cost(compiled, jaxpr), stream="telemetry")
        if previous is not None:
            message = f"{name} was compiled again, {_describe_change(previous, spec)}"
            run.notify("compilations", message)


def _describe_change(previous: dict[str, str], spec: dict[str, str]) -> str:
    changes = [
        f"{path} from {previous.get(path, 'nothing')} to {spec.get(path, 'nothing')}"
        for path in dict.fromkeys((*previous, *spec))
        if previous.get(path) != spec.get(path)
    ]
    if not changes:
        return "for another program of the same batches"
    return f"the batch changed: {'; '.join(changes)}"


def _estimate_cost(compiled: jax.stages.Compiled, jaxpr: ClosedJaxpr) -> dict[str, float]:
    """Return FLOPs, and what the backend knows of an executable; nothing where it has no estimate.

    Args:
        compiled: the executable.
        jaxpr: the program as it was traced.
    """
    cost: Any = compiled.cost_analysis() or {}
    memory: Any = compiled.memory_analysis()
    estimates = {"flops": count_flops(jaxpr), "bytes_accessed": cost.get("bytes accessed")}
    for name in ("temp", "argument", "output"):
        estimates[f"{name}_bytes"] = getattr(memory, f"{name}_size_in_bytes", None)
    return {name: float(value) for name, value in estimates.items() if value is not None}
