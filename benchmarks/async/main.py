"""Asynchronous 1F1B with its weight policies: how fast, how much memory, how accurate?

    python benchmarks/async/main.py [--quick] [--json FILE]
    python benchmarks/async/main.py --accuracy --images DIR --sentences DIR [--json FILE]

README.md says what is measured and how. ("async" is a word of Python's, so the code lies beside.)
"""

from __future__ import annotations

import sys

from benchmarks.asynchronous.main import main

if __name__ == "__main__":
    sys.exit(main())
