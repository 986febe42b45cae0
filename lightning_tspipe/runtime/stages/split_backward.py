"""The backward of a stage in two halves, so that the second can fill a bubble.

Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR 2024: only the gradients of a stage's inputs are
waited for by another stage; those of its weights can be computed at any time before the optimizer
step. Here the split is made in the autograd graph, for any module::

    stage input ◄─ conv1 ◄─ bn1 ◄─ relu ◄─ linear ◄─ stage output
                     │       │               │
                  weight  weight           weight      │ input half    │ weight half
                   W       I                W          │ ◄─ and I      │ W

The calls on the path to an input run in the input half. Of those, the *heavy* ones (convolutions,
matrix products) leave the gradients of their own parameters for later: the gradient that arrives
at them is kept, and in the weight half each continues from there to its parameters alone. A
parameter that is read in more than one place gets its whole gradient in the input half.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

_HEAVY = tuple(
    f"{name}Backward"
    for name in ("Addbmm", "Addmm", "Baddbmm", "Bmm", "Convolution", "Linear", "MkldnnLinear", "Mm")
)


@contextmanager
def arriving(leaves: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """While inside, gradients that reach leaves are kept in a list, as they lie in memory.

    A leaf's own ``grad`` would be a copy that lies as the leaf does; it stays as it is.

    Args:
        leaves: Tensors, some of which require gradients.

    Yields:
        The gradient of each; None where there is none.
    """
    found: list[Tensor | None] = [None] * len(leaves)

    def keep(place: int, gradients: tuple[Tensor | None, ...]) -> tuple[None]:
        (found[place],) = gradients
        return (None,)

    nodes = {  # held, since no graph holds that of a leaf which nothing was computed from
        place: get_gradient_edge(leaf).node
        for place, leaf in enumerate(leaves)
        if leaf.requires_grad
    }
    handles = [node.register_prehook(partial(keep, place)) for place, node in nodes.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class SplitBackward:
    """One backward through a stage's graph, as an input half and a weight half.

    Afterwards every ``.grad`` is what ``torch.autograd.backward`` would have left. If no input
    requires a gradient, the input half does all the work. A hook on an activation that is the
    result of a heavy call runs in both halves, so it must not change the gradient.

    Args:
        outputs: What the stage passed on.
        inputs: What it received: leaf tensors.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._outputs = tuple(outputs)
        self._inputs = tuple(inputs)
        self._pending: list[_HeavyCall] = []

    def input_half(self, grad_outputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the inputs, and of the parameters that are not put off.

        Args:
            grad_outputs: For each output its gradient, of the output's shape; None if it is unused.

        Returns:
            For each input its gradient; None where it requires none or nothing depends on it.
        """
        pairs = [
            (output, gradient)
            for output, gradient in zip(self._outputs, grad_outputs, strict=True)
            if gradient is not None and output.requires_grad
        ]
        self._outputs = ()
        inputs = [tensor for tensor in self._inputs if tensor.requires_grad]
        if not pairs:
            return tuple(None for _ in self._inputs)
        roots, gradients = zip(*pairs, strict=True)
        if not inputs:
            torch.autograd.backward(roots, gradients)
            return tuple(None for _ in self._inputs)
        with arriving(self._inputs) as arrived:
            self._run(roots, gradients, inputs)
        self._inputs = ()
        return tuple(arrived)

    def _run(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        now, self._pending = _divide([get_gradient_edge(root).node for root in roots], inputs)
        handles = [call.keep_gradient() for call in self._pending]
        try:
            torch.autograd.backward(
                roots, gradients, retain_graph=bool(self._pending), inputs=[*inputs, *now]
            )
        finally:
            for handle in handles:
                handle.remove()

    def weight_half(self) -> None:
        """Accumulate the gradients that the input half left out; frees the graph."""
        pending, self._pending = self._pending, []
        while pending:
            pending.pop().finish()


@dataclass(slots=True)
class _HeavyCall:
    """A convolution or matrix product whose parameters get their gradients later."""

    node: Node
    parameters: list[Tensor] = field(default_factory=list)
    arrived: list[Tensor] = field(default_factory=list)

    def keep_gradient(self) -> RemovableHandle:
        """Have the next backward remember what arrives at the node."""
        arrived = self.arrived  # not self, which the node would then keep alive

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            if gradients[0] is not None:
                arrived.append(gradients[0])

        return self.node.register_prehook(keep)

    def finish(self) -> None:
        """Continue the backward from the node to its parameters."""
        if self.arrived:
            torch.autograd.backward(
                [GradientEdge(self.node, 0)], [self.arrived.pop()], inputs=self.parameters
            )


def _divide(
    roots: Sequence[Node], inputs: Sequence[Tensor]
) -> tuple[list[Tensor], list[_HeavyCall]]:
    """Find the parameters whose gradients are due now, and the calls that keep theirs for later."""
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    order = postorder(roots)
    path: set[Node] = set()  # the nodes through which gradients reach an input
    leaves: dict[Node, frozenset[Node]] = {}  # per node: the parameters below, but not by the path
    for node in order:
        below = _next_nodes(node)
        if node in ends or not path.isdisjoint(below):
            path.add(node)
        is_parameter = hasattr(node, "variable") and node not in ends
        own = frozenset((node,)) if is_parameter else frozenset()
        leaves[node] = own.union(*(leaves[child] for child in below if child not in path))
    readers: dict[Node, list[Node | None]] = {}  # per parameter: heavy nodes, None for others
    for node in path.union(roots):
        is_put_off = node in path and node.name().startswith(_HEAVY)
        for leaf in leaves[node]:
            readers.setdefault(leaf, []).append(node if is_put_off else None)
    now: list[Tensor] = []
    later: dict[Node, _HeavyCall] = {}
    for leaf, nodes in readers.items():
        parameter: Tensor = leaf.variable  # type: ignore[attr-defined]
        if len(nodes) == 1 and nodes[0] is not None:
            later.setdefault(nodes[0], _HeavyCall(nodes[0])).parameters.append(parameter)
        else:
            now.append(parameter)
    return now, list(later.values())


def _next_nodes(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def postorder(roots: Iterable[Node]) -> list[Node]:
    """All nodes below the roots, each after those that it passes gradients to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in _next_nodes(node) if child not in seen]
    return order
