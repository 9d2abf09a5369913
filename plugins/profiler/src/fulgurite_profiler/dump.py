"""Write each program that is compiled, before and after XLA has optimized it."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fulgurite as fg
import jax
from fulgurite.errors import ConfigurationError
from fulgurite.plugins import count_flops, count_model_flops, hide_constructor_frames
from fulgurite_runs import RunPlugin, get_folder
from jax.extend.core import ClosedJaxpr

FOLDER = "programs"


@hide_constructor_frames
@dataclass(eq=False)
class ProgramDump(RunPlugin):
    """Write each program that a fit compiles into `programs/ATTEMPT-NUMBER-NAME` of the run
    directory.

    There are `jaxpr.txt`, as JAX has traced it; `before.mlir`, the StableHLO that XLA began with;
    `after.hlo.txt`, what it has made of that; and `cost.json`, FLOPs, and the bytes that one device
    needs. Of several processes the first writes.

    Example:
        from fulgurite_profiler import ProgramDump

        engine = fg.Engine(steps=100, run_dir="runs/a", plugins=[ProgramDump()])
    """

    plugin_name = "programs"

    _numbers = fg.PerFit(lambda: itertools.count(1))

    @fg.hookimpl
    def on_fit_start(self, run: fg.Run) -> None:
        """Refuse a run without a directory."""
        if run.run_dir is None and run.engine.fast_dev_run is None:
            raise ConfigurationError(
                "ProgramDump writes into the run's directory, and this run has none: give "
                "Engine(run_dir='runs/a') or --run runs/a, or leave it out"
            )

    @fg.hookimpl
    def on_compile(
        self,
        run: fg.Run | None,
        name: str,
        compiled: jax.stages.Compiled,
        jaxpr: ClosedJaxpr,
        lowered: jax.stages.Lowered,
    ) -> None:
        """Write a program.

        Args:
            run: the run; nothing is written outside of one.
            name: of the program.
            compiled: the executable.
            jaxpr: the program as it was traced.
            lowered: what was handed to XLA.
        """
        if run is None or run.run_dir is None or jax.process_index() > 0:
            return
        run.run_dir.assert_locked()
        parent = get_folder(run.run_dir.path, FOLDER)
        folder = parent / f"{run.attempt}-{next(self._numbers)}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            "jaxpr.txt": str(jaxpr),
            "before.mlir": lowered.as_text(),
            "after.hlo.txt": compiled.as_text(),
            "cost.json": json.dumps(_describe_cost(compiled, jaxpr), indent=2) + "\n",
        }
        for file, text in texts.items():
            if text is not None:
                Path(folder, file).write_text(text)


def _describe_cost(compiled: jax.stages.Compiled, jaxpr: ClosedJaxpr) -> dict[str, float]:
    """Return what one step, or batch of an evaluation, takes.

    Args:
        compiled: the executable.
        jaxpr: the program as it was traced.
    """
    memory: Any = compiled.memory_analysis()
    cost = {"flops": count_flops(jaxpr), "model_flops": count_model_flops(jaxpr)}
    for name in ("argument", "output", "alias", "temp", "generated_code"):
        value = getattr(memory, f"{name}_size_in_bytes", None)
        if value is not None:
            cost[f"{name}_bytes"] = value
    return cost
