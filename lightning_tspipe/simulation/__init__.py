"""Timelines: what a schedule would take, and what a run took. Pure Python."""
