"""Amounts as people write them: ``32GiB``, ``50GB/s``, ``20us``."""

from __future__ import annotations

import re

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.setup import parse_bytes

_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


def parse_bandwidth(text: str) -> float:
    """Bytes per second.

    Raises:
        ConfigurationError: The text is no bandwidth.

    >>> parse_bandwidth("50GB/s"), parse_bandwidth("100Gbit/s")
    (50000000000.0, 12500000000.0)
    """
    bits = re.fullmatch(r"\s*([\d.]+)\s*([KMG])bit/s\s*", text, re.IGNORECASE)
    if bits is not None:
        amount = parse_bytes(f"{bits[1]}{bits[2]}B")
        assert amount is not None
        return amount / 8
    amount_text, slash, per = text.rpartition("/")
    if not slash or per.strip() != "s":
        raise ConfigurationError(f"{text!r} is not a bandwidth; write '50GB/s' or '100Gbit/s'")
    amount = parse_bytes(amount_text)
    assert amount is not None
    return float(amount)


def parse_seconds(text: str) -> float:
    """Seconds.

    Raises:
        ConfigurationError: The text is no time.

    >>> parse_seconds("20us"), parse_seconds("1.5 ms")
    (2e-05, 0.0015)
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([mun]?s)\s*", text)
    if match is None:
        raise ConfigurationError(f"{text!r} is not a time; write '20us' or '1.5ms'")
    return float(match[1]) / _PER_SECOND[match[2]]


def format_seconds(seconds: float) -> str:
    """Three digits and a unit.

    >>> format_seconds(0.0123), format_seconds(2.5)
    ('12.3 ms', '2.5 s')
    """
    for unit, number in _PER_SECOND.items():
        if seconds * number >= 1:
            return f"{seconds * number:.3g} {unit}"
    return f"{seconds:.3g} s"
