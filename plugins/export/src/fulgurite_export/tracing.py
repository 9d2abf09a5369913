"""Tracing a function of a model into a program that takes a flat list of arrays."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import fulgurite as fg
import jax
import jax.numpy as jnp
from fulgurite.errors import ConfigurationError, ModelError
from fulgurite.plugins import get_method, leaves_with_paths, provide_rngs
from jax import export as jax_export
from jax.interpreters import partial_eval
from jaxtyping import PyTree

from fulgurite_export.callbacks import check_no_callbacks
from fulgurite_export.dtypes import DTYPES
from fulgurite_export.errors import ExportError
from fulgurite_export.functions import Function
from fulgurite_export.manifest import ArraySpec
from fulgurite_export.shapes import Options, collect_open, explain_open_sizes, make_specs
from fulgurite_export.structures import Template, build, describe, list_paths


@dataclass(frozen=True)
class Traced:
    """A function of a model as a program.

    Attributes:
        exported: the program, called with a list of weights and one of inputs.
        weights: the numbers of the model's arrays that it reads.
        inputs: all arrays of its inputs.
        reads: the numbers of those that it reads.
        structure: of its inputs.
        outputs: what it returns.
        output_structure: their structure.
        constraints: on the open sizes of its inputs.
        takes_seed: whether the seed is its last input.
    """

    exported: jax_export.Exported
    weights: tuple[int, ...]
    inputs: tuple[ArraySpec, ...]
    reads: tuple[int, ...]
    structure: Template
    outputs: tuple[ArraySpec, ...]
    output_structure: Template
    constraints: tuple[str, ...]
    takes_seed: bool


class FlatModel:
    """A model as a list of arrays.

    Attributes:
        names: of the arrays, their paths in the module; of those of a model state `model_state[i]`.
        arrays: of the arrays; random keys as their numbers.
        step: how many updates the model had.

    Args:
        module: the module.
        model_state: its `eqx.nn.State`, or None.
        step: becomes an attribute.
    """

    def __init__(self, module: PyTree, model_state: eqx.nn.State | None, step: int) -> None:
        self.step = step
        arrays, self._static = eqx.partition((module, model_state), eqx.is_array)
        leaves, self._treedef = jax.tree.flatten(arrays)
        self._key_impls = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]
        self.arrays = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves]
        names = [path for path, _ in leaves_with_paths(arrays[0])]
        num_states = len(leaves) - len(names)
        self.names = [*names, *(f"model_state[{index}]" for index in range(num_states))]
        if len({*self.names}) != len(self.names):
            raise ConfigurationError(
                "the module has a field `model_state`, which is the name of the layers' state: "
                "rename it"
            )

    def join(self, arrays: Sequence[Any]) -> tuple[Any, Any]:
        """Return module and model state with these arrays."""
        leaves = [
            array if impl is None else jax.random.wrap_key_data(array, impl=impl)
            for array, impl in zip(arrays, self._key_impls, strict=True)
        ]
        return eqx.combine(jax.tree.unflatten(self._treedef, leaves), self._static)


@dataclass(frozen=True)
class Prepared:
    """A function that was traced once, to see what it reads.

    Attributes:
        flat: the function, of a list of the weights and one of the inputs that it reads.
        weights: the numbers of the model's arrays that it reads.
        reads: the numbers of the inputs that it reads.
        takes_seed: whether the seed is its last input.
        structure: of its inputs.
        input_specs: shapes of all inputs, some with open sizes.
        weight_specs: shapes of all arrays of the model.
        body: has the structure of the outputs, once it was traced.
    """

    flat: Callable[[list[Any], list[Any]], list[Any]]
    weights: tuple[int, ...]
    reads: tuple[int, ...]
    takes_seed: bool
    structure: Template
    input_specs: list[jax.ShapeDtypeStruct]
    weight_specs: list[jax.ShapeDtypeStruct]
    body: "_Body"


def prepare_function(
    function: Function, model: FlatModel, engine: fg.Engine, options: Options
) -> Prepared:
    """Return a function of a model as one of flat lists.

    Args:
        function: the function, as `make_functions` completes it.
        model: the model.
        engine: whose plugins surround the function, as they do in `Engine.predict`.
        options: how it is exported.

    Raises:
        ConfigurationError: the inputs or their shapes cannot be exported.
        ModelError: the function cannot.
    """
    try:
        structure, leaves = describe(function.inputs)
    except ExportError as error:
        raise ConfigurationError(f"{function.name}: inputs: {error}") from error
    specs = make_specs(function, list_paths(structure), leaves, options)
    body = _Body(function, model, structure, engine)
    weight_specs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in model.arrays]
    examples = [
        jax.ShapeDtypeStruct(leaf.shape, spec.dtype)
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    selection = _find_what_is_read(body, weight_specs, specs, examples)
    return Prepared(
        flat=selection.restrict(body),
        weights=selection.weight_numbers,
        reads=selection.input_numbers,
        takes_seed=selection.takes_seed,
        structure=structure,
        input_specs=specs,
        weight_specs=weight_specs,
        body=body,
    )


def trace_function(
    function: Function, model: FlatModel, engine: fg.Engine, options: Options
) -> Traced:
    """Return a function of a model as a program; the arguments are those of
    `prepare_function`."""
    prepared = prepare_function(function, model, engine, options)
    specs = prepared.input_specs
    seed_specs = [jax.ShapeDtypeStruct((), jnp.uint32)] if prepared.takes_seed else []
    with _leave_out_paths():
        exported = jax_export.export(jax.jit(prepared.flat), platforms=options.platforms)(
            [prepared.weight_specs[number] for number in prepared.weights],
            [*(specs[number] for number in prepared.reads), *seed_specs],
        )
    if exported.nr_devices != 1:
        raise ModelError(
            f"{function.name}: its program is for {exported.nr_devices} devices, because of a "
            "sharding in the model, and a folder is for one: leave out with_sharding_constraint "
            "and shard_map where it is exported"
        )
    names = list_paths(prepared.structure)
    output_names = list_paths(prepared.body.output_structure)
    return Traced(
        exported=exported,
        weights=prepared.weights,
        inputs=tuple(_as_array_spec(name, spec) for name, spec in zip(names, specs, strict=True)),
        reads=prepared.reads,
        structure=prepared.structure,
        outputs=tuple(
            _as_array_spec(name, aval)
            for name, aval in zip(output_names, exported.out_avals, strict=True)
        ),
        output_structure=prepared.body.output_structure,
        constraints=tuple(function.constraints or ()),
        takes_seed=prepared.takes_seed,
    )


class _Body:
    """The function as it is traced: of flat lists of arrays.

    Attributes:
        output_structure: of what it returned last.
    """

    def __init__(
        self, function: Function, model: FlatModel, structure: Template, engine: fg.Engine
    ) -> None:
        self.name = function.name
        self.output_structure: Template = None
        self._function = function
        self._model = model
        self._structure = structure
        self._engine = engine

    def __call__(self, weights: Sequence[Any], inputs: Sequence[Any], seed: Any) -> list[Any]:
        """Return the outputs; traced."""
        module, model_state = self._model.join(weights)
        ctx = fg.Context(
            self._engine.make_rng_streams(jax.random.key(seed)),
            jnp.int32(self._model.step),
            training=False,
            model_state=model_state,
            rng_path=((self.name, 0),),
            due_flags={name: jnp.asarray(False) for name in self._engine.services.due_names},
            evaluation=self.name,
        ).for_forward()
        with fg.training_mode(False, module) as module:
            outputs = self._call(module, build(self._structure, inputs), ctx)
        try:
            self.output_structure, leaves = describe(outputs)
        except ExportError as error:
            raise ModelError(f"{self.name}: what it returns: {error}") from error
        if not leaves:
            raise ModelError(f"{self.name} returned no array")
        return leaves

    def _call(self, module: Any, batch: Any, ctx: fg.Context) -> Any:
        """Return what the function gives within the hooks `around_forward`, as `Engine.predict`
        calls it."""
        step = self._find_step(module)

        def call(module: Any, batch: Any) -> Any:
            with provide_rngs(ctx):
                return step(module, batch, ctx)

        wrapped = self._engine.plugins.hooks.around_forward.wrap(
            call, per_plugin=lambda plugin: {"ctx": ctx.for_plugin(plugin.name)}
        )
        return wrapped(module, batch)

    def _find_step(self, module: Any) -> Callable[[Any, Any, fg.Context], Any]:
        """Return the function as it is called with a module, a batch and a context."""
        name, call = self._function.name, self._function.call
        if call is None and name == "predict":
            return get_method(module, "predict_step")
        if call is None:
            if not callable(getattr(type(module), name, None)):
                raise ConfigurationError(
                    f"{type(module).__name__} has no method {name!r}: define it, or give "
                    f"Function({name!r}, call=...)"
                )
            call = getattr(type(module), name)
        if "ctx" in inspect.signature(call).parameters:
            return lambda module, batch, ctx: call(module, batch, ctx=ctx)
        return lambda module, batch, ctx: call(module, batch)


@dataclass
class _Selection:
    """What of its arguments a function reads.

    Attributes:
        weights: True for each array of the model that it reads.
        inputs: likewise of the inputs.
        takes_seed: whether it reads the seed.
        weight_specs: shapes of all arrays of the model.
        input_specs: shapes of all inputs.
    """

    weights: list[bool]
    inputs: list[bool]
    takes_seed: bool
    weight_specs: list[jax.ShapeDtypeStruct]
    input_specs: list[jax.ShapeDtypeStruct]

    @property
    def weight_numbers(self) -> tuple[int, ...]:
        """The numbers of the arrays that are read."""
        return tuple(number for number, flag in enumerate(self.weights) if flag)

    @property
    def input_numbers(self) -> tuple[int, ...]:
        """The numbers of the inputs that are read."""
        return tuple(number for number, flag in enumerate(self.inputs) if flag)

    def restrict(self, body: _Body) -> Callable[[list[Any], list[Any]], list[Any]]:
        """Return a function of what is read; whatever else the body gets is zero."""

        def call(weights: list[Any], inputs: list[Any]) -> list[Any]:
            *inputs, seed = [*inputs, *([] if self.takes_seed else [jnp.uint32(0)])]
            return body(
                _fill(self.weights, weights, self.weight_specs),
                _fill(self.inputs, inputs, self.input_specs),
                seed,
            )

        return call


def _fill(flags: list[bool], values: Sequence[Any], specs: list[jax.ShapeDtypeStruct]) -> list[Any]:
    """Return values where the flags are true, and zeros elsewhere.

    Args:
        flags: one for each array.
        values: one for each flag that is true.
        specs: shapes of all arrays.
    """
    remaining = iter(values)
    filled = [next(remaining) if flag else None for flag in flags]
    # As large as the others are here: an ONNX file is traced with sizes of its own.
    sizes = {
        str(size): actual
        for spec, value in zip(specs, filled, strict=True)
        if value is not None
        for size, actual in zip(spec.shape, value.shape, strict=True)
    }
    return [
        jnp.zeros([sizes.get(str(size), size) for size in spec.shape], spec.dtype)
        if value is None
        else value
        for spec, value in zip(specs, filled, strict=True)
    ]


def _find_what_is_read(
    body: _Body,
    weight_specs: list[jax.ShapeDtypeStruct],
    input_specs: list[jax.ShapeDtypeStruct],
    example_specs: list[jax.ShapeDtypeStruct],
) -> _Selection:
    """Return what a function reads: a caller need not give the rest, such as labels.

    Args:
        body: the function.
        weight_specs: shapes of all arrays of the model.
        input_specs: shapes of all inputs.
        example_specs: shapes of the examples of inputs, without open sizes.
    """

    def trace(specs: list[jax.ShapeDtypeStruct]) -> Any:
        seed = jax.ShapeDtypeStruct((), jnp.uint32)
        program = jax.jit(body).trace(weight_specs, specs, seed).jaxpr
        check_no_callbacks(program, body.name)
        return program.jaxpr

    with explain_open_sizes(body.name, lambda: trace(example_specs)):
        program = trace(input_specs)
    _, flags = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    weights, inputs = flags[: len(weight_specs)], flags[len(weight_specs) : -1]
    read_specs = [spec for spec, flag in zip(input_specs, inputs, strict=True) if flag]
    if collect_open(input_specs) - collect_open(read_specs):
        # It may read the size of an input of which it reads no number.
        has_open = [bool(collect_open([spec])) for spec in input_specs]
        inputs = [flag or is_open for flag, is_open in zip(inputs, has_open, strict=True)]
    return _Selection(weights, inputs, flags[-1], weight_specs, input_specs)


@contextmanager
def _leave_out_paths() -> Iterator[None]:
    """Have JAX write no locations: they are paths of files on the machine that exports."""
    limit = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)


def _as_array_spec(name: str, spec: Any) -> ArraySpec:
    """Return an array with open sizes as the manifest has it."""
    if spec.dtype.name not in DTYPES:
        raise ModelError(f"{name or 'the output'} is of dtype {spec.dtype}: it cannot be exported")
    shape = tuple(size if isinstance(size, int) else str(size) for size in spec.shape)
    return ArraySpec(name, spec.dtype.name, shape)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
