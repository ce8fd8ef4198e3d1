"""One commit for a whole step: what a script imports."""

from __future__ import annotations

from .run.commit import Transaction, new_transaction

__all__ = [
    "Transaction",
    "new_transaction",
]
