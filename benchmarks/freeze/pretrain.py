"""Prepares the data of the real runs, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.freeze.pretraining import prepare


def main() -> None:
    """Arguments: the images, four sizes, epochs of the pretraining, the file to write."""
    images, before, train, held, test, epochs, path = sys.argv[1:]
    sizes = int(before), int(train), int(held), int(test)
    prepare(Path(images), sizes, int(epochs), Path(path))


if __name__ == "__main__":
    main()
