"""Read programs that XLA has optimized, as text: of which layer an operation is, and its FLOPs."""

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_SHAPE = re.compile(r"[a-z]+\d*[a-z0-9]*\[([\d,]*)\]")
_METADATA = re.compile(r"metadata=\{[^}]*\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_GEMM_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_DIM_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)")

CONTROL_FLOW = ("while", "conditional", "call")
"""Operations whose time is that of the operations within them."""


class Instruction(NamedTuple):
    """An operation of a program.

    Attributes:
        name: unique in the program.
        opcode: such as `dot` or `fusion`.
        shape: of the result, or of its first array.
        operands: the names of what it is computed from.
        attributes: the rest of the line.
    """

    name: str
    opcode: str
    shape: tuple[int, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def op_name(self) -> str:
        """The scopes in which it was traced, and the primitive; empty where XLA does not know."""
        match = _OP_NAME.search(self.attributes)
        return "" if match is None else match[1]


@dataclass
class HLOProgram:
    """A program that XLA has optimized.

    Attributes:
        name: of the module, such as `jit__run`.
        instructions: by name.
        computations: the names of the instructions of each computation, by its name.
    """

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    computations: dict[str, list[str]] = field(default_factory=dict)

    def count_flops(self, name: str) -> float:
        """Return the FLOPs of products of matrices and convolutions in one call of an operation; 0
        for one that contains others as a loop does, because these are operations themselves.

        Args:
            name: of the instruction.
        """
        instruction = self.instructions.get(name)
        if instruction is None or instruction.opcode in CONTROL_FLOW:
            return 0.0
        if instruction.opcode == "dot":
            match = _CONTRACTING.search(instruction.attributes)
            return self._count_product(instruction, "" if match is None else match[1])
        if instruction.opcode == "convolution" or "__cudnn$conv" in instruction.attributes:
            return self._count_convolution(instruction)
        if instruction.opcode == "custom-call":
            match = _GEMM_CONTRACTING.search(instruction.attributes)
            return 0.0 if match is None else self._count_product(instruction, match[1])
        match = _CALLS.search(instruction.attributes)
        inner = [] if match is None else self.computations.get(match[1], [])
        return sum((self.count_flops(other) for other in inner), start=0.0)

    def describe_form(self, name: str) -> tuple[Any, ...]:
        """Return what two operations have in common that a library computes by one kernel: shapes
        and settings.

        Args:
            name: of the instruction.
        """
        instruction = self.instructions[name]
        operands = [self._get_shape(instruction, index) for index in range(2)]
        settings = _METADATA.sub("", instruction.attributes)
        return instruction.shape, *operands, settings

    def _count_product(self, instruction: Instruction, contracting: str) -> float:
        left = self._get_shape(instruction, 0)
        axes = [int(axis) for axis in re.findall(r"\d+", contracting)]
        if left is None or any(axis >= len(left) for axis in axes):
            return 0.0
        return 2.0 * math.prod(instruction.shape) * math.prod(left[axis] for axis in axes)

    def _count_convolution(self, instruction: Instruction) -> float:
        kernel = self._get_shape(instruction, 1)
        labels = _DIM_LABELS.search(instruction.attributes)
        if kernel is None or labels is None or len(labels[1]) != len(kernel):
            return 0.0
        pairs = zip(labels[1], kernel, strict=True)
        per_output = math.prod(size for label, size in pairs if label != "o")
        return 2.0 * per_output * math.prod(instruction.shape)

    def _get_shape(self, instruction: Instruction, index: int) -> tuple[int, ...] | None:
        if index >= len(instruction.operands):
            return None
        operand = self.instructions.get(instruction.operands[index])
        return None if operand is None else operand.shape


def parse_program(text: str) -> HLOProgram:
    """Return a program from its text, as `compiled.as_text()` gives it. Lines of another form are
    passed over."""
    lines = text.splitlines()
    header = re.match(r"HloModule ([^,\s]+)", lines[0] if lines else "")
    program = HLOProgram("" if header is None else header[1])
    names: list[str] = []
    for line in lines[1:]:
        computation = _COMPUTATION.match(line)
        if computation is not None:
            names = program.computations.setdefault(computation[1], [])
            continue
        match = _INSTRUCTION.match(line)
        instruction = None if match is None else _parse_instruction(match[1], match[2])
        if instruction is not None:
            program.instructions[instruction.name] = instruction
            names.append(instruction.name)
    return program


def _parse_instruction(name: str, rest: str) -> Instruction | None:
    """Return an instruction; None for a line of another form.

    Args:
        name: that stands before the equals sign.
        rest: what stands behind it: `f32[2,3]{1,0} dot(%a, %b), lhs_contracting_dims={1}, ...`.
    """
    end = _find_end(rest) if rest.startswith("(") else rest.find(" ")
    if end < 0:
        return None
    opcode, bracket, arguments = rest[end:].strip().partition("(")
    if not bracket:
        return None
    length = _find_end("(" + arguments) - 1
    shape = _SHAPE.search(rest[:end])
    sizes = () if shape is None else tuple(int(size) for size in shape[1].split(",") if size)
    operands = re.findall(r"%([\w.-]+)", arguments[:length])
    return Instruction(name, opcode, sizes, tuple(operands), arguments[length:])


def _find_end(text: str) -> int:
    """Return the index behind the bracket that closes the one with which a text begins; -1 if none
    does."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    return -1


_NO_SCOPE = re.compile(
    r"jit\(.*\)|pjit|while|body|cond|closed_call|checkpoint|remat2?|rematted_computation|"
    r"branch_\d+_fun|custom_(?:jvp|vjp)_call(?:_jaxpr)?|shard_map|scan"
)
_TRANSFORM = re.compile(r"(?:transpose|jvp|vmap|pmap|mask)\((.*)\)")


class LayerPath(NamedTuple):
    """Where in a model an operation is.

    Attributes:
        path: the scopes, such as `features/eqx.nn.MLP/eqx.nn.Linear`; empty outside of them.
        is_backward: whether it is of the backward pass.
    """

    path: str
    is_backward: bool

    def __str__(self) -> str:
        return f"{self.path or '-'}{' (backward)' if self.is_backward else ''}"


def parse_layer_path(op_name: str) -> LayerPath:
    """Return the layer of an operation: its scopes, without those that JAX adds.

    Args:
        op_name: of an instruction, such as `jit(run)/transpose(jvp(encoder))/dot_general`; its last
            part is the primitive.
    """
    scopes = []
    for part in _split(op_name)[:-1]:
        scope = part
        while (match := _TRANSFORM.fullmatch(scope)) is not None:
            scope = match[1]
        scopes += [inner for inner in _split(scope) if inner and not _NO_SCOPE.fullmatch(inner)]
    return LayerPath("/".join(scopes), "transpose(" in op_name)


def _split(op_name: str) -> list[str]:
    """Return the parts between slashes that are not within brackets."""
    parts = [""]
    depth = 0
    for character in op_name:
        depth += (character == "(") - (character == ")")
        if character == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
