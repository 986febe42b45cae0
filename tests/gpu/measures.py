"""What `make gpu` measures, in processes of their own: `python -m tests.gpu.measures NAME DEVICE`.

Figures are of this machine and of small networks: whether something is wrong, not how fast it is.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tspipe import MomentumEMA, PipelineTimeline, TSPipeStrategy
from tests.gpu.main import RESULT

_QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
_STEPS = 24
_WARM = 8
Figures = dict[str, Any]


def block(width: int) -> nn.Sequential:
    """A convolution that leaves the size as it is."""
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    )


def network(width: int, depth: int = 6) -> nn.Sequential:
    """Convolutions, and a projection."""
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 64)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *(block(width) for _ in range(depth)), *head
    )


class Distillation(LightningModule):
    """A student that follows its own average, as in BYOL."""

    def __init__(self, width: int, memory_format: torch.memory_format | None = None) -> None:
        super().__init__()
        self.student, self.teacher = network(width), network(width)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(requires_grad=False)
        self.format = memory_format

    def training_step(self, batch: Any, _index: int) -> Tensor:
        (images,) = batch
        if self.format is not None:
            images = images.contiguous(memory_format=self.format)
        student = self.student(images)
        with torch.no_grad():
            teacher = self.teacher(images.flip(3))
        return -fn.cosine_similarity(student, teacher).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.05, momentum=0.9)


class Watch(Callback):
    """Times of steady steps, and losses."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.losses.append(outputs["loss"].detach())
        if len(self.ends) in {_WARM, _STEPS - 1} and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Of a step."""
        return (self.ends[_STEPS - 1] - self.ends[_WARM]) / (_STEPS - 1 - _WARM)


Sizes = tuple[int, int, int]
"""Width of the network, size of an image, samples of a batch."""


def sizes(device: str, *, is_large: bool = False) -> Sizes:
    """Those of a short step, or of one that keeps a GPU busy."""
    if device == "cpu":
        return (24, 24, 16) if is_large else (8, 12, 8)
    return (256, 64, 256) if is_large else (64, 32, 128)


def train(
    device: str, strategy: Any, *callbacks: Any, memory_format: Any = None,
    is_large: bool = False, **options: Any,
) -> Watch:  # fmt: skip
    """A short training on one device."""
    seed_everything(1, verbose=False)
    width, image, batch = sizes(device, is_large=is_large)
    data = TensorDataset(torch.randn(batch * _STEPS, 3, image, image))
    watch = Watch()
    trainer = Trainer(
        **_QUIET, accelerator="cpu" if device == "cpu" else "gpu", devices=1, strategy=strategy,
        max_steps=_STEPS, callbacks=[MomentumEMA(0.9), *callbacks, watch], **options,
    )  # fmt: skip
    trainer.fit(Distillation(width, memory_format), DataLoader(data, batch))
    return watch


def plain(device: str) -> Any:
    """Lightning's own strategy for one device."""
    return SingleDeviceStrategy(device=device)


def alone_against_lightning(device: str) -> Figures:
    """How much longer a step takes with this strategy on one device; in turns."""
    found: Figures = {}
    for name, is_large in (("short", False), ("long", True)):
        ratios, alone = [], []
        for _ in range(3):
            own = train(device, TSPipeStrategy(num_microbatches=1), is_large=is_large).seconds
            alone.append(train(device, plain(device), is_large=is_large).seconds)
            ratios.append(own / alone[-1])
        found[f"ratio of {name} steps"] = round(statistics.median(ratios), 3)
        found[f"ms of {name} ones"] = round(1e3 * statistics.median(alone), 1)
    return found


def waits_of_the_host(device: str) -> Figures:
    """How often the host waits for the device in a steady step, as torch warns of it."""
    found: Figures = {}
    places: Counter[str] = Counter()
    schedules = {
        "tspipe": {}, "gpipe": {"schedule": "gpipe"}, "sequential": {"schedule": "sequential"},
        "pipedream": {"schedule": "1f1b", "weights": "pipedream"}, "lightning": None,
    }  # fmt: skip
    for name, options in schedules.items():
        strategy = plain(device) if options is None else TSPipeStrategy(**options)
        counting = _Counting()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(device, strategy, counting)
        torch.cuda.set_sync_debug_mode("default")
        waits = [one for one in caught if "called a synchronizing" in str(one.message)]
        number = len(waits)
        places.update(f"{name}: {one.filename}:{one.lineno}" for one in waits)
        found[name] = round(number / counting.num_steps, 2)
    more = max(found.values()) - found["lightning"]
    found["more than Lightning's"] = round(more, 2)
    assert more <= 0, (found, places)
    return found


class _Counting(Callback):
    """Has torch warn of waits in steady steps."""

    num_steps = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any,
                           batch_idx: int) -> None:  # fmt: skip
        is_steady = _WARM <= batch_idx < _STEPS - 2
        torch.cuda.set_sync_debug_mode("warn" if is_steady else "default")
        self.num_steps += is_steady


def planned_against_real_memory(device: str) -> Figures:
    """What a plan of two ranks on one GPU says that they need, and their peaks."""
    strategy = TSPipeStrategy(ranks_per_device=2, start_method="spawn")
    seed_everything(1, verbose=False)
    width, image, batch = sizes(device)
    data = TensorDataset(torch.randn(batch * _STEPS, 3, image, image))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **_QUIET, accelerator="gpu", devices=1, strategy=strategy, max_steps=_STEPS,
            callbacks=[MomentumEMA(0.9), _Peaks(Path(folder))],
        )  # fmt: skip
        trainer.fit(Distillation(width), DataLoader(data, batch))
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    ratios = [one["real"] / one["planned"] for one in told if one["planned"]]
    sizes_in_mb = [[round(one[key] / 2**20, 1) for one in told] for key in ("planned", "real")]
    planned, real = sizes_in_mb
    return {"peak to plan, by rank": [round(ratio, 2) for ratio in ratios],
            "planned MiB": planned, "peak MiB": real}  # fmt: skip


class _Peaks(Callback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        run = trainer.strategy
        plan = None if run.resumption.now is None else run.resumption.now.plan
        rank = run.pipeline_rank
        told = {
            "planned": None if plan is None else plan.memory_bytes[rank],
            "real": torch.cuda.max_memory_allocated(),
        }
        (self._folder / f"{rank}.json").write_text(json.dumps(told))


def profile_against_step(device: str) -> Figures:
    """The sum of what atoms were measured to take, to a step without a pipeline."""
    from lightning_tspipe.cli.modules import measure  # noqa: PLC0415 - it knows the command line

    width, image, batch = sizes(device)
    module = Distillation(width)
    loader = DataLoader(TensorDataset(torch.randn(batch * 2, 3, image, image)), batch)
    profile = measure(module, loader, accelerator="cpu" if device == "cpu" else "gpu")
    atoms = [*profile.student.atoms, *(profile.teacher.atoms if profile.teacher else ())]
    forwards = sum(atom.forward[batch] for atom in atoms)
    backwards = sum(atom.backward.get(batch, 0.0) for atom in atoms)
    step = train(device, plain(device)).seconds
    return {"atoms to step": round((forwards + backwards) / step, 2)}


def options_of_a_training(device: str) -> Figures:
    """Precisions, a compiler and a memory format: whether losses are those of Lightning."""
    compiled = "inductor" if device != "cpu" else "aot_eager"
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "32-true": ({}, {}),
        "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
        "compile": ({"compile": {"backend": compiled}}, {}),
        "channels_last": ({}, {"memory_format": torch.channels_last}),
    }
    if device != "cpu":
        cases["16-mixed"] = ({}, {"precision": "16-mixed"})
    found: Figures = {}
    for name, (own, common) in cases.items():
        piped = train(device, TSPipeStrategy(num_microbatches=1, schedule="gpipe", **own), **common)
        expected = train(device, plain(device), **common)
        pairs = zip(piped.losses, expected.losses, strict=True)
        distance = max(abs(float(a) - float(b)) for a, b in pairs)
        found[f"{name}: losses differ by"] = float(f"{distance:.1e}")
        assert distance < 0.05, found
    return found


def overhead_of_recording(device: str) -> Figures:
    """How much longer a step takes that is drawn."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            drawing = PipelineTimeline(_WARM, _STEPS - _WARM - 1, f"{folder}/drawn.json")
            drawn = train(device, TSPipeStrategy(), drawing).seconds
            ratios.append(drawn / train(device, TSPipeStrategy()).seconds)
    return {"ratio of steps": round(statistics.median(ratios), 3)}


def two_ranks_of_nccl_on_one_gpu(device: str) -> Figures:
    """Whether the library allows it, as one with NCCL_MULTI_RANK_GPU_ENABLE may."""
    context = torch.multiprocessing.get_context("spawn")
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_greet, args=(rank, f"{folder}/store", device), daemon=True)
            for rank in range(2)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(30)
        codes = [one.exitcode for one in ranks]
        for one in ranks:
            one.kill()
    return {"allowed": codes == [0, 0]}


def _greet(rank: int, store: str, device: str) -> None:
    import torch.distributed as dist  # noqa: PLC0415 - in a process of its own

    where = torch.device(device)
    torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=2, device_id=where
    )
    hello = torch.ones(1, device=where)
    dist.all_reduce(hello)
    assert hello.item() == 2
    dist.destroy_process_group()


MEASURES: dict[str, Callable[[str], Figures]] = {
    one.__name__: one
    for one in (
        alone_against_lightning, waits_of_the_host, planned_against_real_memory,
        profile_against_step, options_of_a_training, overhead_of_recording,
        two_ranks_of_nccl_on_one_gpu,
    )
}  # fmt: skip

if __name__ == "__main__":
    name, where = sys.argv[1:]
    figures = MEASURES[name](where)
    print(f"{RESULT}{json.dumps(figures)}")
