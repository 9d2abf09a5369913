"""Executables that the engines of a process share.

XLA takes most of the time until the first step. A second engine of the same program, as in a sweep
or a notebook, is traced again, because what a function does may depend on anything; it is compiled
only if its text differs from that of the programs before. XLA works on a thread, so that what else
a fit begins with is done meanwhile, and so that a wait for it can be left.
"""

from collections import OrderedDict, deque
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from hashlib import sha256
from threading import Lock, Thread
from time import perf_counter
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import ClosedJaxpr

from fulgurite._src.execution.flops import contains_primitive
from fulgurite._src.waits import Wait
from fulgurite.errors import ConfigurationError

MAX_EXECUTABLES = 32
"""How many are kept; the one that was not used for longest goes first."""

# XLA's default scheduler on CPU wakes another thread for every few kernels that are ready at once.
# That costs a step with a small state more than it gains: 0.88 against 0.79 of a hand-written one.
# Large ones and convolutions gain.
_SMALL_STATE_BYTES = 2**20
_SMALL_STEP_OPTIONS: dict[str, Any] = {
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
}

_executables: OrderedDict[Any, jax.stages.Compiled] = OrderedDict()


def keep_compiled_programs(directory: str) -> None:
    """Have JAX keep all that it compiles from now on in a directory, for the next process.

    Raises:
        ConfigurationError: the path has `~` or `$`, which only a shell expands.
    """
    if directory.startswith("~") or "$" in directory:
        raise ConfigurationError(
            f"Engine: compilation_cache_dir is {directory!r}, and neither ~ nor variables are "
            "expanded there: give os.path.expandvars(os.path.expanduser(...))"
        )
    jax.config.update("jax_compilation_cache_dir", directory)
    # JAX leaves out what compiles within a second, which most programs of a small model do.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # If something was compiled before, JAX remembers that there is no directory.
    compilation_cache.reset_cache()


def choose_compiler_options(program: ClosedJaxpr, arrays: list[Any]) -> dict[str, Any] | None:
    """Return options for a step on a small state without convolutions; None for the default.

    Args:
        program: the step.
        arrays: of its state, or their shapes.
    """
    if sum(array.size * array.dtype.itemsize for array in arrays) >= _SMALL_STATE_BYTES:
        return None
    if contains_primitive(program, "conv_general_dilated"):
        return None
    return _SMALL_STEP_OPTIONS.get(jax.default_backend())


class Compilation:
    """The compilation of a lowered program, which `start` or `wait` begins.

    XLA compiles on a thread of its own, on which no code of a user runs: that was traced before.
    Where a program of the same text was compiled already, there is nothing to wait for.

    The thread is not a daemon: an interpreter that ends while XLA compiles on a daemon thread is
    aborted. So a process ends when XLA has done what it has begun.

    Example:
        from fulgurite._src.execution.executables import Compilation

        arguments = (jnp.arange(3.0),)
        compilation = Compilation(jax.jit(jnp.sum).lower(*arguments), arguments)
        compilation.wait()(*arguments)  # 3

    Attributes:
        background_seconds: that XLA compiled while nobody waited; known once somebody has waited.
        future: the executable, or what XLA has raised.
        lowered: the program.

    Args:
        lowered: the program.
        arguments: those it was lowered for; an executable stays on their devices.
        options: for XLA.
    """

    def __init__(
        self, lowered: jax.stages.Lowered, arguments: Any, options: dict[str, Any] | None = None
    ) -> None:
        self.background_seconds = 0.0
        self.lowered = lowered
        self._seconds = 0.0
        self.future: Future[jax.stages.Compiled] = Future()
        self._key = _find_text_key(lowered, arguments, options)
        # Whoever acquires it starts the thread.
        self._start_lock = Lock()
        # The default device is that of a thread.
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        self._thread = Thread(
            target=self._compile, args=(lowered, options, device), name="fulgurite-compile"
        )

    def start(self) -> None:
        """Have XLA begin, unless it has."""
        if not self._start_lock.acquire(blocking=False):
            return
        executable = None if self._key is None else _executables.get(self._key)
        if executable is not None:
            self.future.set_result(executable)
            return
        try:
            self._thread.start()
        except RuntimeError as error:
            # The system starts no further thread; whoever waits is told.
            self.future.set_exception(error)

    def wait(self, patience: float | None = None) -> jax.stages.Compiled:
        """Return the executable, the same one for the same text; raise what XLA has raised.

        Args:
            patience: as of `Wait`.
        """
        started = perf_counter()
        self.start()
        with Wait("the compiler", patience):
            # A signal that comes just before a lock is waited for does not end that wait.
            while not self.future.done():
                wait([self.future], timeout=0.5)
        executable = self.future.result()
        self.background_seconds = max(self._seconds - (perf_counter() - started), 0.0)
        if self._key is not None:
            _executables[self._key] = executable
            _executables.move_to_end(self._key)
            if len(_executables) > MAX_EXECUTABLES:
                _executables.popitem(last=False)
        return executable

    def _compile(
        self, lowered: jax.stages.Lowered, options: dict[str, Any] | None, device: Any
    ) -> None:
        started = perf_counter()
        try:
            with jax.default_device(device):
                executable = lowered.compile(options)
        except BaseException as error:
            self.future.set_exception(error)
            return
        self._seconds = perf_counter() - started
        self.future.set_result(executable)


class CompilationQueue(AbstractContextManager["CompilationQueue", None]):
    """Starts compilations one after the other, so that what is needed first is there first.

    Whoever waits for one has it started at once. What has not begun when the context ends never
    begins, unless somebody waits for it.

    Example:
        from fulgurite._src.execution.executables import Compilation, CompilationQueue

        arguments = (jnp.arange(3.0),)
        with CompilationQueue() as queue:
            queue.add(Compilation(jax.jit(jnp.sum).lower(*arguments), arguments))
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: deque[Compilation] = deque()
        self._is_busy = False

    def add(self, compilation: Compilation) -> None:
        """Have a compilation start after those that were added before."""
        with self._lock:
            self._waiting.append(compilation)
            if self._is_busy:
                return
            self._is_busy = True
        self._start_next()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._waiting.clear()

    def _start_next(self, _: object = None) -> None:
        with self._lock:
            self._is_busy = bool(self._waiting)
            if not self._waiting:
                return
            compilation = self._waiting.popleft()
        compilation.start()
        compilation.future.add_done_callback(self._start_next)


def compile_lowered(
    lowered: jax.stages.Lowered, arguments: Any, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Return the executable of a lowered program; the arguments are those of `Compilation`."""
    return Compilation(lowered, arguments, options).wait()


def _find_text_key(
    lowered: jax.stages.Lowered, arguments: Any, options: dict[str, Any] | None
) -> tuple[Any, ...] | None:
    """Return a key that programs have in common if one executable serves them; None if that cannot
    be told."""
    text = lowered.as_text()
    # Arrays that a function holds may be no part of the text, and neither are the functions that a
    # program calls on the host.
    is_whole = not getattr(jax.config, "jax_use_simplified_jaxpr_constants", False)
    used_arguments = _find_used_arguments(lowered)
    if not is_whole or "callback" in text or used_arguments is None:
        return None
    return (
        sha256(text.encode()).digest(),
        # Arguments that are not used are not part of the text either, nor does it say which of
        # several alike are used.
        str(lowered.in_avals),
        used_arguments,
        lowered.in_tree,
        lowered.out_tree,
        tuple(sorted((options or {}).items())),
        jax.config.jax_default_device,  # pyright: ignore[reportAttributeAccessIssue]
        _find_devices(arguments),
    )


def _find_used_arguments(lowered: jax.stages.Lowered) -> tuple[int, ...] | None:
    """Return the indices of the arguments that a program uses; None if JAX does not tell.

    There is no public name for them: jax 0.10 and 0.12 have them here.
    """
    details = getattr(lowered._lowering, "compile_args", None) or {}
    indices = details.get("kept_var_idx")
    return None if indices is None else tuple(sorted(indices))


def _find_devices(arguments: Any) -> frozenset[Any]:
    """Return the devices on which the arrays of a tree lie, or are to lie; of a mesh, in its order,
    of which the text says nothing."""
    devices: set[Any] = set()
    for leaf in jax.tree.leaves(arguments):
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        if sharding is not None:
            mesh = getattr(sharding, "mesh", None)
            devices |= sharding.device_set if mesh is None else {tuple(mesh.devices.flat)}
    return frozenset(devices)
