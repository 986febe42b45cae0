"""What atoms run: a traced network cut into ranges, or a module that is called as a whole.

Nothing is copied out of the network: whoever swaps a parameter, a buffer or a submodule's
``forward`` changes what the next run does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.codegen import Calls, RangeFunction, write_function
from lightning_tspipe.networks.cuts import (
    allocates,
    find_cuts,
    memory_roots,
    number_nodes,
    read_attribute,
    sink_constants,
    target_name,
    written_argument,
)
from lightning_tspipe.networks.modules import is_leaf, title
from lightning_tspipe.networks.tracing import trace

_MODELESS = frozenset({nn.Sequential, nn.ModuleList, nn.ModuleDict})


@dataclass(frozen=True, slots=True)
class AtomInfo:
    """What one atom of a program is.

    Attributes:
        name: Its calls.
        parameter_names: Names of the parameters that it reads, relative to the network.
        buffer_names: Names of the buffers that it reads.
        num_outputs: How many tensors of a structured return value it computes.
        writes_input: Whether it may change its input in place.
        passes_input: Whether what it passes on may share memory with its input.
    """

    name: str
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    num_outputs: int = 0
    writes_input: bool = False
    passes_input: bool = True


class LeafProgram:
    """A function that is one atom.

    Args:
        run: What it runs.
        info: What the atom is.
        module: Whose parameters it reads.
    """

    def __init__(self, run: RangeFunction, info: AtomInfo, module: nn.Module | None = None) -> None:
        self.module = module
        self.infos = (info,)
        self._run = run

    def function(self, start: int, stop: int) -> RangeFunction:
        """The function of the one atom."""
        del start, stop
        return self._run


def unpacking_program(arguments: Arguments) -> LeafProgram:
    """What makes the tensors of a call from the one that travels."""
    return LeafProgram(
        lambda received: (arguments.unpack(received[0]), ()), AtomInfo("unpack", (), ())
    )


def function_program(
    function: Callable[[Tensor], Tensor], info: AtomInfo, module: nn.Module | None = None
) -> LeafProgram:
    """A function from one tensor to one tensor."""
    return LeafProgram(lambda received: ((function(*received),), ()), info, module)


def module_program(module: nn.Module) -> LeafProgram:
    """A module that is called as a whole."""
    info = AtomInfo(
        name=type(module).__name__,
        parameter_names=tuple(name for name, _ in module.named_parameters()),
        buffer_names=tuple(name for name, _ in module.named_buffers()),
        writes_input=bool(getattr(module, "inplace", False)),
        passes_input=not allocates(module),
    )
    return function_program(module, info, module)


class TracedProgram:
    """A traced module, cut into atoms; one trace for each combination of train and eval modes."""

    def __init__(self, module: nn.Module, name: str, arguments: Arguments | None = None) -> None:
        self.module = module
        self._name = name
        self._arguments = arguments
        self._watched = tuple(
            child
            for child in module.modules()
            if (child is module or not is_leaf(child)) and type(child) not in _MODELESS
        )
        self._first = first = TracedVariant(module, name, arguments)
        self._variants = {self._modes(): first}
        self.infos = first.infos
        self.outputs = first.outputs
        self.spec = first.trace.spec
        self.is_plain = first.trace.is_plain

    def _modes(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self._watched])

    def function(self, start: int, stop: int) -> RangeFunction:
        """The function that runs atoms ``start`` to ``stop`` (exclusive) in the present modes.

        Raises:
            PartitionError: In these modes the network has other atoms than when it was cut.
        """
        modes = self._modes()
        variant = self._variants.get(modes)
        if variant is None:
            variant = self._variants[modes] = self._retraced()
        return variant.function(start, stop)

    def _retraced(self) -> TracedVariant:
        variant = TracedVariant(self.module, self._name, self._arguments)
        if (
            [info.parameter_names for info in variant.infos]
            != [info.parameter_names for info in self.infos]
            or variant.outputs != self.outputs
            or variant.num_passed != self._first.num_passed
            or variant.trace.spec != self.spec
        ):
            raise PartitionError(
                f"{title(self.module, self._name)} does different things in train and eval mode, "
                "so that one cut cannot serve both; move what depends on `self.training` into a "
                "submodule of its own, or give the class a method `pipeline_blocks(self)` that "
                "returns its submodules in the order of forward"
            )
        return variant


class TracedVariant:
    """The atoms of one trace, and the functions written for them so far.

    Attributes:
        infos: What the atoms are.
        outputs: For each tensor of the return value: the atom that computes it, its place there.
    """

    def __init__(self, module: nn.Module, name: str, arguments: Arguments | None = None) -> None:
        self.trace = trace(module, name, arguments)
        self._root = module
        self._nodes = sink_constants(self.trace)
        if not self.trace.leaves or number_nodes(self._nodes).intersection(self.trace.leaves):
            raise PartitionError(
                f"{title(module, name)} returns no tensor, or a number that depends on its input; "
                "return tensors and constants only"
            )
        cuts = find_cuts(self.trace, self._nodes, module)
        self._bounds = [0, *(index + 1 for index, _ in cuts), len(self._nodes)]
        last = self.trace.leaves if self.trace.is_plain else ()
        self._passed = [self.trace.inputs, *(values for _, values in cuts), tuple(last)]
        self._functions: dict[tuple[int, int], RangeFunction] = {}
        self._emitted: list[list[fx.Node]] = [[] for _ in self._bounds[1:]]
        self.outputs = () if self.trace.is_plain else tuple(map(self._emit, self.trace.leaves))
        names = {id(p): n for n, p in module.named_parameters()}
        buffers = {id(b): n for n, b in module.named_buffers()}
        self.infos = tuple(self._info(k, names, buffers) for k in range(len(self._emitted)))

    def _emit(self, leaf: fx.Node) -> tuple[int, int]:
        if leaf in self.trace.inputs:
            atom = 0
        elif leaf.op == "get_attr":
            atom = len(self._emitted) - 1
        else:
            position = self._nodes.index(leaf)
            atom = sum(bound <= position for bound in self._bounds[1:])
        self._emitted[atom].append(leaf)
        return atom, len(self._emitted[atom]) - 1

    @property
    def num_passed(self) -> list[int]:
        """How many tensors pass in front of each atom, and behind the last."""
        return [len(values) for values in self._passed]

    def function(self, start: int, stop: int) -> RangeFunction:
        """The function that runs atoms ``start`` to ``stop`` (exclusive)."""
        function = self._functions.get((start, stop))
        if function is None:
            calls = Calls(
                self._nodes[self._bounds[start] : self._bounds[stop]],
                self._passed[start],
                self._passed[stop],
                [leaf for leaves in self._emitted[start:stop] for leaf in leaves],
            )
            function = write_function(self._root, calls, self.trace.devices)
            self._functions[start, stop] = function
        return function

    def _info(self, atom: int, names: dict[int, str], buffers: dict[int, str]) -> AtomInfo:
        nodes = self._nodes[self._bounds[atom] : self._bounds[atom + 1]]
        tensors = [id(tensor) for tensor in self._tensors(nodes, atom)]
        own, passed = set(nodes), self._passed[atom + 1]
        written = filter(None, map(written_argument, nodes))
        return AtomInfo(
            name=_atom_name(nodes),
            parameter_names=tuple(dict.fromkeys(names[i] for i in tensors if i in names)),
            buffer_names=tuple(dict.fromkeys(buffers[i] for i in tensors if i in buffers)),
            num_outputs=len(self._emitted[atom]),
            writes_input=any(not memory_roots(node) <= own for node in written),
            passes_input=any(not memory_roots(value) <= own for value in passed),
        )

    def _tensors(self, nodes: Sequence[fx.Node], atom: int) -> list[Tensor]:
        tensors: list[Tensor] = []
        leaves = [leaf for leaf in self._emitted[atom] if leaf.op == "get_attr"]
        for node in nodes:
            if node.op == "call_module":
                module: nn.Module = node.meta["module"]
                tensors += [*module.parameters(), *module.buffers()]
            leaves += [argument for argument in node.all_input_nodes if argument.op == "get_attr"]
        return [*tensors, *(read_attribute(self._root, leaf) for leaf in leaves)]


def _atom_name(nodes: Sequence[fx.Node]) -> str:
    numbers = number_nodes(nodes)
    names = [_call_name(node) for node in nodes if node not in numbers] or ["identity"]
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rpartition('.')[2]}"


def _call_name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    return ".".join(filter(None, (node.meta["scope"], target_name(node))))
