"""What is said once of all object stores that a command, or a program, has to do with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

SCHEMES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL",
    "s3a": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS (or GOOGLE_SERVICE_ACCOUNT)",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or a managed identity",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or a managed identity",
}
"""Object stores that can be read and written, and the environment variables that say with which rights."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How object stores are asked.

    Args:
        options: obstore's settings by name, such as ``endpoint`` or ``region``; they win over the environment's.
        connections: Requests at a time, of one store.
        staging: A local folder for files that cannot be sent as they are made.
        plain: Whether what is written gets the names that other loaders look for, once it is published.
        patience: Seconds for which a request that fails is tried again; None for three minutes.
    """

    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # keys and tokens may be among them
    connections: int = 16
    staging: Path | None = None
    plain: bool = False
    patience: float | None = None


_USER_INFO = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")
_SIGNED = re.compile(
    r"(?i)\b((?:x-amz-(?:signature|security-token|credential)|x-goog-signature|sig|token|password|secret)=)[^&\s\"']+"
)


def redacted(text: str) -> str:
    """A text with URLs in it, without the passwords, signatures and tokens of those: for messages, logs and reports."""
    return _SIGNED.sub(r"\1…", _USER_INFO.sub("", text))


SETTINGS: ContextVar[StoreSettings] = ContextVar("SETTINGS", default=StoreSettings())  # noqa: B039 # it is frozen


@contextmanager
def stores_with(settings: StoreSettings) -> Iterator[None]:
    """Let the stores that are opened meanwhile be asked so."""
    before = SETTINGS.set(settings)
    try:
        yield
    finally:
        SETTINGS.reset(before)
