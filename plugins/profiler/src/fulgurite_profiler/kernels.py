"""Find out which operations of a program the kernels of a CUDA graph are.

XLA puts most of a program into graphs. A trace has their kernels with the name of the graph in the
place of an operation's.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fulgurite_profiler.hlo import CONTROL_FLOW, HLOProgram

_NO_KERNEL = ("memset", "memcpy")


class DeviceEvent(NamedTuple):
    """A piece of work in a trace.

    Attributes:
        module: whose program it is of.
        operation: its name, or that of the graph that it is in.
        kernel: what the device ran; on a CPU the operation again.
        node: of a CUDA graph; None outside of one.
        seconds: that it took.
        scopes: in which the operation was traced, where the trace knows; otherwise empty.
    """

    module: str
    operation: str
    kernel: str
    node: int | None
    seconds: float
    scopes: str


def make_event(event: Any, stats: dict[str, Any]) -> DeviceEvent:
    """Return an event of a trace that belongs to an operation.

    Args:
        event: of `jax.profiler.ProfileData`.
        stats: of the event; `hlo_op` is among them.
    """
    node = str(stats.get("cuda_graph_node_id", ""))
    return DeviceEvent(
        str(stats.get("hlo_module", "")),
        str(stats["hlo_op"]),
        event.name,
        int(node) if node.isdecimal() else None,
        event.duration_ns * 1e-9,
        str(stats.get("tf_op", "")),
    )


def split_graphs(
    events: Iterable[DeviceEvent], programs: dict[str, list[HLOProgram]]
) -> list[DeviceEvent]:
    """Return events in which each kernel of a graph has the operation that it is, or its own name
    where that is not known.

    Args:
        events: of one device.
        programs: that ran, by module, the newest last.
    """
    events = list(events)
    by_graph: dict[tuple[str, str, int], dict[int, str]] = defaultdict(dict)
    for event in events:
        if event.node is not None:
            by_graph[_get_graph(event)][event.node] = event.kernel
    operations: dict[int, str] = {}
    for (module, _, _), kernels in by_graph.items():
        for program in programs.get(module, ()):
            operations |= _match(kernels, program)
    return [
        event
        if event.node is None or _is_operation(event, programs)
        else event._replace(operation=operations.get(event.node, event.kernel))
        for event in events
    ]


def _get_graph(event: DeviceEvent) -> tuple[str, str, int]:
    # The number of a node has that of its graph in the upper half.
    return event.module, event.operation, (event.node or 0) >> 32


def _is_operation(event: DeviceEvent, programs: dict[str, list[HLOProgram]]) -> bool:
    """Return whether the program has an operation of this name that does the work itself."""
    return any(
        event.operation in program.instructions
        and program.instructions[event.operation].opcode not in CONTROL_FLOW
        for program in programs.get(event.module, ())
    )


def _match(kernels: dict[int, str], program: HLOProgram) -> dict[int, str]:
    """Return the operation of each node of a graph that is known.

    A kernel of XLA's own has the name of its operation. Those of libraries have names of their own:
    they are the calls of libraries in the program, in the same order, if there are as many.

    Args:
        kernels: their names, by node.
        program: that the graph may be of.
    """
    by_kernel = {re.sub(r"\W", "_", name): name for name in program.instructions}
    matches = {node: by_kernel[name] for node, name in kernels.items() if name in by_kernel}
    others = [node for node in sorted(kernels) if node not in matches]
    others = [node for node in others if not kernels[node].lower().startswith(_NO_KERNEL)]
    calls = _list_library_calls(program)
    if matches and len(others) == len(calls) and _are_alike(others, kernels, calls, program):
        matches |= dict(zip(others, calls, strict=True))
    return matches


def _list_library_calls(program: HLOProgram) -> list[str]:
    """Return the products and convolutions that a library computes, in the order in which they
    run."""
    return [
        name
        for names in program.computations.values()
        for name in names
        if program.instructions[name].opcode == "custom-call" and program.count_flops(name) > 0
    ]


def _are_alike(
    nodes: Sequence[int], kernels: dict[int, str], calls: Sequence[str], program: HLOProgram
) -> bool:
    """Return whether calls of one form have one kernel, but for a tenth of all: otherwise the order
    is another.

    Args:
        nodes: of the graph.
        kernels: their names.
        calls: the operations that they may be, in the same order.
        program: of these.
    """
    by_form: dict[Any, list[str]] = defaultdict(list)
    for node, call in zip(nodes, calls, strict=True):
        by_form[program.describe_form(call)].append(kernels[node])
    num_alike = sum(max(names.count(name) for name in set(names)) for names in by_form.values())
    return num_alike >= 0.9 * len(calls)
