"""Schedules: one pure function per file, from a pipeline to what each rank does in which order.

>>> from lightning_tspipe.schedules.registry import build_schedule
"""
