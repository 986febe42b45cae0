"""Activation cache of frozen layers; independent of Lightning.

Frozen layers give the same output for the same input in every epoch. If a sample's input does not
change either, their output is stored under the sample's id, in memory that all processes of a
machine share, then on disk, and read in later epochs::

    epoch 0    id 7 ── load, decode ── frozen layers ──┬── active layers
                                                       ▼
                                                     cache
                                                       │
    epoch 1    id 7 ───────────────────────────────────┴── active layers

When more layers freeze, an entry that is read runs through the newly frozen ones only.
"""

from lightning_tspipe.caching.cache import ActivationCache, Segment, Worth, measure, measure_reading
from lightning_tspipe.caching.inputs import WithIds, check_repeatable, ids_of
from lightning_tspipe.caching.keys import Boundary, fingerprint, fingerprints

__all__ = [
    "ActivationCache",
    "Boundary",
    "Segment",
    "WithIds",
    "Worth",
    "check_repeatable",
    "fingerprint",
    "fingerprints",
    "ids_of",
    "measure",
    "measure_reading",
]
