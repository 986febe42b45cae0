"""Timelines, simulated or recorded. Pure Python."""
