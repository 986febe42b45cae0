"""What one worker process is to do; plain data, so that it travels between processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One process of one method.

    Attributes:
        program: The module whose function ``train(job, connection)`` a process runs.
        workload: Name of the workload.
        method: Name of the method, see ``the program``.
        options: The method's options, as pairs so that jobs can be compared and hashed.
        batch_size: Images of one step, over all ranks.
        num_ranks: Processes of this method.
        rank: Which of them.
        port: A free TCP port for them to meet.
    """

    program: str
    workload: str
    method: str
    options: tuple[tuple[str, int | float | str], ...]
    batch_size: int
    num_ranks: int
    rank: int
    port: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per call, where the options say so."""
        return int(dict(self.options).get("num_microbatches", 1))

    @property
    def environment(self) -> dict[str, str]:
        """What tells Lightning and torch that the processes exist already."""
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "WORLD_SIZE": str(self.num_ranks),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "NODE_RANK": "0",
        }
