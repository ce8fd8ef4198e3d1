"""Sizes as people write them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(I?)(B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_size(text: str) -> int:
    """Bytes from ``2GB`` (decimal), ``2GiB`` or ``2G`` (binary), ``500000`` (bytes).

    Raises:
        ValueError: It is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"should be a size such as 2GB, 512MiB or 500000000, found {text!r}")
    number, power, binary, unit = match.groups()
    base = 1000 if unit and power and not binary else 1024
    return int(float(number) * base ** _POWERS[power.upper()])
