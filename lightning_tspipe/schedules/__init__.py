"""Schedules: one pure function per file, from a pipeline to the actions of each rank in order.

>>> from lightning_tspipe.schedules.registry import build_step
"""
