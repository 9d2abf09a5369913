"""What was compiled, and why again."""

from dataclasses import dataclass, field
from typing import Any

import fulgurite as fg
import jax
from fulgurite.tree.paths import leaves_with_paths


@dataclass(eq=False)
class CompilationMonitor:
    """Reports each executable that a fit compiles to the loggers, as telemetry: its cost and memory
    as XLA estimates them and, if it is not the first of its name, what changed in the batch."""

    _specs: dict[str, dict[str, str]] = field(default_factory=dict, init=False, repr=False)

    @fg.hookimpl
    def on_compile(
        self, run: fg.Run | None, name: str, batch_spec: Any, compiled: jax.stages.Compiled
    ) -> None:
        """Emits the records."""
        spec = {
            path or "batch": f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in leaves_with_paths(batch_spec)
        }
        before = self._specs.get(name)
        self._specs[name] = spec
        if run is None:
            return
        run.log_scalars(f"compilation/{name}", _cost(compiled), stream="telemetry")
        if before is not None:
            changes = [
                f"{path} from {before.get(path, 'nothing')} to {spec.get(path, 'nothing')}"
                for path in dict.fromkeys((*before, *spec))
                if before.get(path) != spec.get(path)
            ]
            what = (
                f"the batch changed: {'; '.join(changes)}"
                if changes
                else "for another program of the same batches"
            )
            run.log_text(
                "compilations",
                {"message": f"{name} was compiled again, {what}"},
                stream="telemetry",
            )


def _cost(compiled: jax.stages.Compiled) -> dict[str, float]:
    """What the backend tells of an executable; nothing where it does not."""
    cost: Any = compiled.cost_analysis() or {}
    memory: Any = compiled.memory_analysis()
    told = {"flops": cost.get("flops"), "bytes_accessed": cost.get("bytes accessed")}
    for name in ("temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes"):
        told[name.replace("_size_in_bytes", "_bytes")] = getattr(memory, name, None)
    return {name: float(value) for name, value in told.items() if value is not None}
