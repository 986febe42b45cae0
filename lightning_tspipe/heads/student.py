"""Several heads as one student."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.replacing import attributes_replaced


class StudentFanout(nn.Module):
    """Heads that are trained on the same features, each for itself.

    Args:
        heads: The heads by their names; of a list the names are ``head0``, ``head1``, ...
        on_nan: What a loss that is not finite does: ``"raise"`` ends the run, ``"stop"`` ends the
            training of that head, and the others go on.

    Attributes:
        heads: The heads, by name.
        active: The head whose turn it is.
        here: The heads that this process trains; in a pipeline, some of them.
        stopped: Heads that are not trained any more, and why.
        rehearses: Whether a step is run for what it does, and its values mean nothing.

    Raises:
        ConfigurationError: No head at all, one twice, or a name that can't be one.

    >>> import torch
    >>> student = StudentFanout({"kind": nn.Linear(4, 2), "size": nn.Linear(4, 1)})
    >>> with student.only("size"):
    ...     student(torch.zeros(3, 4)).shape
    torch.Size([3, 1])
    """

    def __init__(
        self,
        heads: Mapping[str, nn.Module] | Sequence[nn.Module],
        *,
        on_nan: Literal["raise", "stop"] = "raise",
    ) -> None:
        super().__init__()
        if not isinstance(heads, Mapping):
            heads = {f"head{index}": head for index, head in enumerate(heads)}
        if not heads:
            raise ConfigurationError("StudentFanout needs a head")
        if len({id(head) for head in heads.values()}) < len(heads):
            raise ConfigurationError("StudentFanout: one module is given as two heads; copy it")
        for name in heads:
            if not name.isidentifier():
                raise ConfigurationError(
                    f"StudentFanout: {name!r} can't name a head; names are like those of variables"
                )
        if on_nan not in {"raise", "stop"}:
            raise ConfigurationError(f"on_nan={on_nan!r}: must be 'raise' or 'stop'")
        self.heads = nn.ModuleDict(dict(heads))
        self.on_nan = on_nan
        self.here = tuple(heads)
        self.stopped: dict[str, str] = {}
        self.active: str | None = None
        self.rehearses = False

    @property
    def names(self) -> tuple[str, ...]:
        """All heads."""
        return tuple(self.heads)

    @property
    def trained(self) -> tuple[str, ...]:
        """The heads that this process trains and that have not stopped."""
        return tuple(name for name in self.here if name not in self.stopped)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the active head makes of the features.

        Raises:
            ConfigurationError: It is no head's turn, or the features don't fit the head.
        """
        if self.active is None:
            raise ConfigurationError(
                "StudentFanout was called outside of a head's step. Derive the module from "
                "lightning_tspipe.FanoutTraining, which runs its steps for each head; elsewhere "
                f"call a head: student.heads[{self.names[0]!r}](...)"
            )
        head = self.heads[self.active]
        try:
            return head(*args, **kwargs)
        except RuntimeError as error:
            _explain_shapes(self.active, head, (args, kwargs), error)
            raise

    def only(self, name: str) -> AbstractContextManager[None]:
        """While inside, it is the turn of one head."""
        if name not in self.heads:
            raise ConfigurationError(f"no head {name!r}; there are {', '.join(self.names)}")
        return attributes_replaced([(self, "active", name)])

    def trains(
        self, names: Sequence[str], *, rehearses: bool = False
    ) -> AbstractContextManager[None]:
        """While inside, a step is for some of the heads, whether they have stopped or not.

        Args:
            names: The heads.
            rehearses: Whether the values mean nothing.
        """
        return attributes_replaced([
            (self, "here", tuple(names)), (self, "stopped", {}), (self, "rehearses", rehearses),
        ])  # fmt: skip

    def stop(self, name: str, reason: str) -> None:
        """Train a head no further."""
        self.stopped.setdefault(name, reason)

    def judge(self, name: str, loss: float) -> None:
        """Stop a head that can't learn from its loss; its gradients are dropped.

        Raises:
            ConfigurationError: The loss is not finite, and that is to end the run.
        """
        if math.isfinite(loss):
            return
        reason = f"its loss is {loss}"
        if self.on_nan == "raise":
            raise ConfigurationError(
                f"head {name!r}: {reason}. Lower its learning rate or clip its gradients; with "
                "StudentFanout(..., on_nan='stop') such a head stops and the others go on"
            )
        self.stop(name, reason)
        for parameter in self.heads[name].parameters():
            parameter.grad = None


def _explain_shapes(name: str, head: nn.Module, given: Any, error: RuntimeError) -> None:
    """Say so if the features are not what the first layer of a head expects."""
    shapes = [tuple(t.shape) for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]
    sizes = (
        (f"{path or 'its'} ({type(layer).__name__}) expects {size}", getattr(layer, size), dim)
        for path, layer in head.named_modules()
        for size, dim in (("in_features", -1), ("in_channels", 1), ("num_features", 1))
        if getattr(layer, size, None) is not None
    )
    expects, expected, dim = next(sizes, ("", 0, 0))
    if shapes and expects and (len(shapes[0]) < 2 or shapes[0][dim] != expected):
        raise ConfigurationError(
            f"head {name!r} does not fit the trunk: the features have shape {shapes[0]}, and "
            f"{expects}={expected}"
        ) from error
