"""``python -m lightning_tspipe.cli``."""

from lightning_tspipe.cli.main import main

raise SystemExit(main())
