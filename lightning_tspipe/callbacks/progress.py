"""A second progress bar below Lightning's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

T = TypeVar("T")


class SideProgress:
    """Shows an iteration below the Trainer's progress bar, in the same style.

    Nothing is shown where the Trainer shows nothing.

    Args:
        description: Text before the bar.
    """

    def __init__(self, description: str) -> None:
        self.description = description
        self._display: Any = None
        self._task: Any = None

    def track(self, trainer: Trainer, items: Iterable[T], total: int | None) -> Iterator[T]:
        """Yield the items and show how many were yielded."""
        bar: Any = trainer.progress_bar_callback
        if bar is None or bar.is_disabled:
            yield from items
        elif getattr(bar, "progress", None) is not None:  # RichProgressBar
            yield from self._track_rich(bar.progress, items, total)
        else:
            with Tqdm(
                desc=self.description,
                total=total,
                leave=False,
                position=1,
                dynamic_ncols=True,
                file=sys.stdout,
            ) as line:
                for item in items:
                    yield item
                    line.update()

    def _track_rich(
        self,
        display: Any,
        items: Iterable[T],
        total: int | None,
    ) -> Iterator[T]:
        # Lightning finds its tasks by position, so a task is hidden and used again, never removed.
        if display is not self._display:
            self._display = display
            self._task = display.add_task(self.description, total=total)
        else:
            display.reset(self._task, total=total, visible=True)
        try:
            for item in items:
                yield item
                display.advance(self._task)
        finally:
            display.update(self._task, visible=False)
