"""One run: the pipeline's own runtime, with a thread in the place of each rank's process.

The engine, the executor and the weight policies are those of ``schedule="1f1b"``; messages go
through queues. So a run starts at once, and two runs use two cores. That such a pipeline computes
what processes under a Trainer compute is what ``tests/exactness`` and ``tests/integration`` show:
both are compared with one sequential emulation.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.accuracy.data import images, plain, sentences
from benchmarks.asynchronous.tasks import NUM_STAGES, Classifier, Task, flipped
from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.weights.policies import policy_of
from tests.local_transport import LocalNetwork, LocalTransport

BASELINE, IN_PARTS = "gpipe1", "gpipe4"
"""GPipe with one micro-batch, and with four: what one device trains, so they are trained on one.

They differ where BatchNorm takes the statistics of a micro-batch, as it does in 2BW.
"""

Batch = tuple[Tensor, Tensor]
Meeting = Callable[[], object]


def accuracies(task: Task, arm: str, seed: int, folder: Path) -> list[float]:
    """The accuracy on the test set after each epoch of one run.

    Args:
        task: What is trained.
        arm: ``gpipe1``, ``gpipe4`` or a weight policy.
        seed: Of the weights, the order of the data, and its changes.
        folder: Images or sentences.
    """
    (inputs, labels), test = data(task, folder)
    torch.manual_seed(seed)
    values = Classifier(task).state_dict()
    # 2BW needs as many batches per update as stages: they are smaller by as much.
    parts = NUM_STAGES if arm in {"2bw", IN_PARTS} else 1
    epochs = list(batches(inputs, labels, task, seed))
    run = Run(task, arm, values, epochs, parts)
    return run.on_one_device(test) if arm in {BASELINE, IN_PARTS} else run.on_stages(test)


def data(task: Task, folder: Path) -> tuple[Batch, Batch]:
    """Samples and labels, to train with and to test with."""
    return _read(task.data, task.num_samples, task.num_tests, folder)


@cache
def _read(kind: str, num_samples: int, num_tests: int, folder: Path) -> tuple[Batch, Batch]:
    if kind == "sentences":
        train, test = sentences(folder, num_samples)
    else:
        train = plain(*images(folder / "train", num_samples))
        test = plain(*images(folder / "test", num_tests))
    return train.tensors, test.tensors  # type: ignore[return-value]


def batches(inputs: Tensor, labels: Tensor, task: Task, seed: int) -> Iterator[list[Batch]]:
    """What each epoch trains, the same in every arm."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(task.epochs):
        order = torch.randperm(len(inputs), generator=generator).split(task.batch_size)
        whole = [rows for rows in order if len(rows) == task.batch_size]
        yield [
            (flipped(inputs[rows], generator) if inputs.dim() == 4 else inputs[rows], labels[rows])
            for rows in whole
        ]


class Run:
    """One training.

    Args:
        task: What is trained.
        arm: With which policy.
        values: The weights at the start.
        epochs: The batches of each.
        parts: In how many parts each batch goes, whose gradients are added up.
    """

    def __init__(
        self,
        task: Task,
        arm: str,
        values: dict[str, Tensor],
        epochs: list[list[Batch]],
        parts: int,
    ) -> None:
        self._task, self._arm, self._values, self._parts = task, arm, values, parts
        self._epochs = [
            [
                part
                for inputs, labels in epoch
                for part in zip(inputs.chunk(parts), labels.chunk(parts), strict=True)
            ]
            for epoch in epochs
        ]
        self._epoch_length = len(epochs[0])

    def _made(self) -> Classifier:
        module = Classifier(self._task)
        module.load_state_dict(self._values)
        return module

    def _schedule(self, optimizer: Optimizer) -> LambdaLR:
        return self._task.rate.schedule(optimizer, self._epoch_length, len(self._epochs))

    def on_one_device(self, test: Batch) -> list[float]:
        """Plain training."""
        module, curve = self._made(), []
        optimizer = self._task.optimizer(module.parameters(), self._task.rate.peak)
        scheduler = self._schedule(optimizer)
        for epoch in self._epochs:
            for place, batch in enumerate(epoch, 1):
                (module.training_step(batch) / self._parts).backward()
                if place % self._parts == 0:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            curve.append(accuracy(module, test))
        return curve

    def on_stages(self, test: Batch) -> list[float]:
        """A thread for each stage."""
        network = LocalNetwork(NUM_STAGES, timeout=600)
        curve: list[float] = []
        failures: list[BaseException] = []
        meeting = threading.Barrier(NUM_STAGES)

        def work(rank: int, module: Classifier) -> None:
            try:
                transport = LocalTransport(network, rank)
                found = self._train(module, transport, test, meeting.wait)
                curve.extend(found)
            except BaseException as error:  # noqa: BLE001 - raised again below
                failures.append(error)
                meeting.abort()

        threads = [
            threading.Thread(target=work, args=(rank, self._made()), daemon=True)
            for rank in range(NUM_STAGES)
        ]
        with collection_by_hand():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]
        return curve

    def _train(
        self, module: Classifier, transport: Transport, test: Batch, meet: Meeting
    ) -> list[float]:
        """One rank; the curve on rank 0, nothing elsewhere."""
        engine = self._placed(module, transport)
        optimizer = self._task.optimizer(module.parameters(), self._task.rate.peak)
        scheduler = self._schedule(optimizer)
        weights = engine.weights
        assert weights is not None
        weights.optimizers, weights.batches_per_update = [optimizer], self._parts
        curve = []
        for epoch in self._epochs:
            engine.drain()
            for place in range(len(epoch)):
                weights.position = place
                self._step(engine, module, epoch, place)
                if (place + 1) % self._parts == 0:
                    optimizer.step()
                    weights.updated()
                    scheduler.step()
                    optimizer.zero_grad()
            state = engine.shards.state_dict(engine.rank, transport)
            if engine.is_loss_rank:
                whole = Classifier(self._task)
                whole.load_state_dict(dict(state))
                curve.append(accuracy(whole, test))
            meet()
            if engine.is_loss_rank:
                gc.collect()
            meet()
        return curve

    def _step(
        self, engine: PipelineEngine, module: Classifier, epoch: Sequence[Batch], place: int
    ) -> None:
        ahead = epoch[place + 1 : place + 1 + engine.lookahead]
        reads = engine.is_data_rank
        loss = engine.forward(
            module.training_step,
            epoch[place] if reads else None,
            [(batch, module.training_step) for batch in ahead] if reads else [],
        )
        run = None if loss is None else partial(torch.Tensor.backward, loss / self._parts)
        engine.backward(run, reduce=(place + 1) % self._parts == 0)

    def _placed(self, module: Classifier, transport: Transport) -> PipelineEngine:
        cpu, networks = torch.device("cpu"), Networks(("student",), ())
        here = Rank(module, networks, transport, cpu)
        captured = here.capture(module.training_step, self._epochs[0][0])
        atoms = captured.networks["student"].atoms
        starts = [0] + [
            next(i for i, atom in enumerate(atoms) for n in atom.parameter_names
                 if n.startswith(f"student.{stage}."))
            for stage in range(1, NUM_STAGES)
        ]  # fmt: skip
        ranks = tuple(reversed(range(NUM_STAGES)))
        placement = Placement(NUM_STAGES, (*starts, len(atoms)), ranks, (), ())
        policy = policy_of(self._arm)
        return PipelineEngine(here, captured, placement, "1f1b", policy=policy)


@torch.no_grad()
def accuracy(module: Classifier, test: Batch) -> float:
    """The share of test samples that are classified right."""
    network = module.student.eval()
    right = sum(
        int((network(inputs).argmax(dim=1) == labels).sum())
        for inputs, labels in zip(test[0].split(200), test[1].split(200), strict=True)
    )
    network.train()
    return right / len(test[1])


@contextmanager
def collection_by_hand() -> Iterator[None]:
    """While inside, garbage is collected where all ranks meet.

    A collection within ``torch.get_rng_state`` may let another thread have the interpreter, which
    waits for the generator's mutex.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
