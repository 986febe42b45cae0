"""Quantities with units, parsed and formatted: ``32GiB``, ``50GB/s``, ``20us``."""

from __future__ import annotations

import re

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.strategy.setup.options import parse_bytes

_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


def parse_bandwidth(text: str) -> float:
    """Parse bytes per second.

    Raises:
        ConfigurationError: The text is not a bandwidth.

    >>> parse_bandwidth("50GB/s"), parse_bandwidth("100Gbit/s")
    (50000000000.0, 12500000000.0)
    """
    match = re.fullmatch(r"\s*([\d.]+\s*[KMG]?)(i?B|bit)/s\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigurationError(f"{text!r} is not a bandwidth; write '50GB/s' or '100Gbit/s'")
    is_bits = match[2].lower() == "bit"
    amount = parse_bytes(match[1] + ("B" if is_bits else match[2]))
    assert amount is not None
    return amount / (8 if is_bits else 1)


def parse_flops(text: str) -> float:
    """Parse floating-point operations per second.

    Raises:
        ConfigurationError: The text is not such a rate.

    >>> parse_flops("60TFLOP/s"), parse_flops("1.5 PFLOPS")
    (60000000000000.0, 1500000000000000.0)
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([GTP])FLOP(?:S|/s)\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigurationError(f"{text!r} is not a speed; write '60TFLOP/s'")
    return float(match[1]) * {"G": 1e9, "T": 1e12, "P": 1e15}[match[2].upper()]


def parse_seconds(text: str) -> float:
    """Parse a time in seconds.

    Raises:
        ConfigurationError: The text is not a time.

    >>> parse_seconds("20us"), parse_seconds("1.5 ms")
    (2e-05, 0.0015)
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([mun]?s)\s*", text)
    if match is None:
        raise ConfigurationError(f"{text!r} is not a time; write '20us' or '1.5ms'")
    return float(match[1]) / _PER_SECOND[match[2]]


def parse_speeds(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas.

    Raises:
        ConfigurationError: One of them is not a number.

    >>> parse_speeds("1, 0.5")
    (1.0, 0.5)
    """
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigurationError(f"{text!r} is not a list of speeds; write '1,1,0.5,0.5'") from None


def parse_memories(text: str) -> tuple[float, ...]:
    """Parse amounts of memory separated by commas, in bytes.

    Raises:
        ConfigurationError: One of them is not an amount.

    >>> parse_memories("1GB, 500MB")
    (1000000000.0, 500000000.0)
    """
    return tuple(float(parse_bytes(part) or 0) for part in text.split(","))


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits and a unit.

    >>> format_seconds(0.0123), format_seconds(2.5)
    ('12.3 ms', '2.5 s')
    """
    for unit, number in _PER_SECOND.items():
        if seconds * number >= 1:
            return f"{seconds * number:.3g} {unit}"
    return f"{seconds:.3g} s"
