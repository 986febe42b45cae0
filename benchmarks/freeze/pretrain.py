"""Prepares the data of the real runs, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.freeze.pretraining import prepare


def main() -> None:
    """Arguments: the images, three sizes, epochs of the pretraining, the file to write."""
    images, first, second, third, epochs, path = sys.argv[1:]
    prepare(Path(images), (int(first), int(second), int(third)), int(epochs), Path(path))


if __name__ == "__main__":
    main()
