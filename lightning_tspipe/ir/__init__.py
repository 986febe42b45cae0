"""The schedule language: actions, their ranks and their dependencies. Pure Python."""
