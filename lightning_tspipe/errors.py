"""Errors that users can meet; each message names the remedy."""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "CheckpointError",
    "ConfigurationError",
    "PartitionError",
    "ScheduleError",
    "TSPipeError",
    "TransportError",
]


class TSPipeError(Exception):
    """Base class of all errors that this package raises deliberately."""


class ConfigurationError(TSPipeError, ValueError):
    """The arguments, the module or the callbacks contradict each other or the hardware."""


class CaptureError(TSPipeError):
    """A ``training_step`` that cannot be split into pipelined calls and a loss."""


class NoCallError(CaptureError):
    """A step that calls no pipelined network."""


class TrainedTeacherError(CaptureError):
    """A step that trains a network which is forward-only."""

    def __init__(self) -> None:
        super().__init__(
            "the teacher's output requires gradients. A teacher is forward-only: set "
            "requires_grad_(False) on its parameters or call it under torch.no_grad(); "
            "a network that is trained belongs to the student"
        )


class FedByTrainedError(CaptureError):
    """A network gets what something else that is trained has made.

    Args:
        message: What to say.
        network: ``student`` or ``teacher``.
        before: The submodule that has made it; "": a parameter of the module's own.
    """

    def __init__(self, message: str, network: str, before: str) -> None:
        super().__init__(message)
        self.network, self.before = network, before


class SpoiledError(CaptureError):
    """A step uses what a network has written into.

    Args:
        message: What to say.
        network: The network.
    """

    def __init__(self, message: str, network: str) -> None:
        super().__init__(message)
        self.network = network


class PartitionError(TSPipeError, ValueError):
    """A network that cannot be cut into the requested number of stages."""


class ScheduleError(TSPipeError, ValueError):
    """A schedule that would compute something else, or never finish."""


class TransportError(TSPipeError):
    """A rank that died, stalled, or sent something unexpected."""


class CheckpointError(TSPipeError):
    """A checkpoint that can't be read."""
