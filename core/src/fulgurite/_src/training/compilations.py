"""What was compiled: told to plugins, and limited."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from fulgurite._src.plugins.manager import PluginManager
from fulgurite._src.tree.specs import format_tree
from fulgurite.errors import CompilationError


class MessageSink(Protocol):
    """What is known here of a running fit: its step, and that it takes messages."""

    @property
    def step(self) -> int: ...

    def notify(self, source: str, message: str) -> None: ...


@dataclass(eq=False)
class Compilations:
    """Tells plugins of each new executable, and limits how many there are.

    Attributes:
        plugins: whose hook `on_compile` is called.
        limit: the largest number of batch shapes of one program.
        run: the fit that is running, or None.
    """

    plugins: PluginManager
    limit: int
    run: MessageSink | None = None

    def report(
        self,
        name: str,
        batch_spec: Any,
        traced: jax.stages.Traced,
        lowered: jax.stages.Lowered,
        compiled: jax.stages.Compiled,
    ) -> None:
        """Call `on_compile`; the arguments are those of the hook, with the trace for its program.

        Args:
            name: of the program.
            batch_spec: what it was compiled for.
            traced: the program as it was traced.
            lowered: what was handed to XLA.
            compiled: the executable.
        """
        self.plugins.hooks.on_compile.call(
            None if self.run is None else self.run.step,
            run=self.run,
            name=name,
            batch_spec=batch_spec,
            compiled=compiled,
            jaxpr=traced.jaxpr,
            lowered=lowered,
        )

    def notify(self, message: str) -> None:
        """Tell the user something: as a message of the fit that is running, or as a warning."""
        if self.run is None:
            warnings.warn(message, stacklevel=2)
        else:
            self.run.notify("fulgurite", message)

    def check_limit(self, where: str, spec: Any, known_specs: Sequence[Any]) -> None:
        """Raise an error if one more executable would be too many.

        Args:
            where: which batch needs it, in words.
            spec: the shapes of that batch.
            known_specs: those that the program was compiled for already.

        Raises:
            CompilationError: `max_compilations` is reached.
        """
        if len(known_specs) < self.limit:
            return
        shapes = "\n".join(f"  {format_tree(known)}" for known in known_specs)
        raise CompilationError(
            f"{where}, {format_tree(spec)}, would be shape number {self.limit + 1} and "
            f"max_compilations is {self.limit}. Seen so far:\n{shapes}\n"
            "Pad batches to few shapes, the last of an epoch by ArrayData(remainder='pad'), "
            "or raise the number"
        )
