"""Executes the schedules: one rank, step after step."""
