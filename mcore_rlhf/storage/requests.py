"""Requests to an object store: how they are made, for how long they are tried again, and what is said when they fail.

There is one policy for all: what fails in passing (the network, a busy store, an answer that is cut, none at all) is asked again with
growing pauses, until a deadline. Small requests are asked again here, as a whole, with the body of their answer. Of a file that is sent
in parts obstore asks again for each part, with the same deadline. A condition that was met by a request whose answer was lost is told
from one that another writer has broken by reading back: see :meth:`.objects.ObjectStore.put_if`.

Source: obstore 0.12.1, ``_store/_client.pyi`` and ``_store/_retry.pyi``; object_store 0.12, ``client/retry.rs``: no conditional PUT is
sent twice, the body of an answer is not asked for again, and ten tries with jitter end after three to six seconds.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import StorageError, headline, log_of
from .settings import SCHEMES, StoreSettings, redacted
from .waiting import waiting_for

_log = log_of(__name__)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

T = TypeVar("T")

DEADLINE_S = 180.0
"""For how long a request is tried again, unless ``patience`` or ``--store-option timeout`` says otherwise."""

_ANSWER_S = 30.0
"""A connection on which nothing comes for so long is given up, and another one is tried."""

_LEAST_ANSWER_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_JITTER = random.SystemRandom()
"""Not the process' own random states: those are training's, and are saved and compared bit for bit."""

_ADVICE = {
    "NoSuchBucket|ContainerNotFound": "Check the bucket's name, and the endpoint (AWS_ENDPOINT_URL, or --store-option endpoint=…).",
    "without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed": (
        "The bucket lies in another region: name that one, by AWS_REGION or --store-option region=…"
    ),
    "RequestTimeTooSkewed|RequestExpired": "Requests are signed with the time, and this machine's clock is wrong: set it, and try again.",
    "ExpiredToken": "The credentials are too old: get new ones, and try again.",
    "SlowDown|status code: (503|429)|ServerBusy": (
        "The store is busy; it was asked again, with growing pauses. Try again later, or with fewer --connections."
    ),
    "error sending request|timed out|timeout": (
        "Is the endpoint right (AWS_ENDPOINT_URL, or --store-option endpoint=…), and does this machine reach it? "
        "How long is waited: --store-option timeout=SECONDS."
    ),
}
"""What helps, by what a store says. Source: Amazon S3, API reference, Error responses; object_store 0.12, ``client/retry.rs``
(redirects); Azure, Blob service error codes."""

_FOR_GOOD = re.compile(
    r"status code: (?:4(?!08|29)|3|501)\d*|without LOCATION|certificate|builder error|NotSupported|not implemented",
    re.IGNORECASE,
)
"""What will be said again however often it is asked."""


class Requests:
    """Asks one store, each time until it answers or the deadline has come.

    Args:
        url: What keys begin with in messages: ``s3://bucket/``.
        settings: How it is asked.
        options: Of these the store's own, by obstore's names.

    Raises:
        ValueError: An option has a value that it cannot have.
    """

    def __init__(self, url: str, settings: StoreSettings, options: Mapping[str, str]) -> None:
        self.url = url
        self._options = dict(options)
        given = self._options.pop("timeout", None)
        asked_for = None if given is None else _seconds(given)
        self._patience = asked_for or (DEADLINE_S if settings.patience is None else settings.patience)
        self.deadline = self._patience
        self._answer = min(_ANSWER_S, asked_for or max(_LEAST_ANSWER_S, self.deadline))
        self._sending = asked_for or max(DEADLINE_S, self.deadline)
        self.gave_up: Exception | None = None
        """What a store ended with that has not answered until the deadline: nobody waits for it once more; see :meth:`forgive`."""
        self._was_answered = False
        self.client = self._made(self._answer, max(self._answer, self.deadline), retries=0)

    @property
    def sender(self) -> Client:
        """What sends and copies what is large: each part is tried again by itself, and an answer may be as long in coming as a part."""
        return self._made(self._sending, self._sending, retries=1_000)

    def _made(self, answer: float, whole: float, retries: int) -> Client:
        retry = self._patience if retries else 0.0
        return _client(
            self.url, frozenset(self._options.items()), (answer, whole, retries, retry), frozenset(os.environ.items()), os.getpid()
        )  # fmt: skip

    def ask(self, key: str, doing: str, action: Callable[[Client], T]) -> T:
        """Ask until it is answered.

        Args:
            key: What about.
            doing: What for: completes "cannot …".
            action: Asks, and may be done again.

        Raises:
            FileNotFoundError: There is no such object.
            StorageError: The store refuses, or cannot be reached.
        """
        _log.debug("%s: to %s %s", self.url, doing, key)
        with self.asking(key, doing):
            return self.patiently(lambda: action(self.client))

    def patiently(self, action: Callable[[], T]) -> T:
        """Do something until it does not fail in passing; :meth:`ask` says the last error in our words, too."""
        if self.gave_up is not None:
            raise self.gave_up
        end, pause = time.monotonic() + self.deadline, _FIRST_PAUSE_S
        while True:
            try:
                answer = action()
                self._was_answered = True
                return answer
            except Exception as error:
                if not self._passes(error):
                    raise
                left = end - time.monotonic()
                if left <= 0:
                    self._give_up(error)
                    raise
                wait = min(left, pause * _JITTER.uniform(0.5, 1.0))  # the last try is at the deadline
                _log.info("%s: asks again in %.1f s: %s", self.url, wait, headline(said(error)))
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def forgive(self, *, once: bool = False) -> None:
        """Ask again, also where it was given up; each time until the deadline, or once."""
        self.gave_up = None
        self.deadline = 0.0 if once else self._patience

    def _give_up(self, error: Exception) -> None:
        """Of a store that has not answered for so long, the next question would only be waited for as long again."""
        if "status code:" not in _head(error):
            self.gave_up = error

    def _passes(self, error: Exception) -> bool:
        from obstore.exceptions import GenericError, JoinError

        passing = isinstance(error, GenericError | JoinError | OSError) and not isinstance(error, FileNotFoundError)
        if not passing or _FOR_GOOD.search(_head(error)):
            return False
        return self._was_answered or not lacks_credentials(error)

    @contextmanager
    def asking(self, key: str, doing: str, hint: str = "") -> Iterator[None]:
        """Say what is waited for, where it takes long, and in our words what the store refuses.

        Args:
            key: What it is asked about.
            doing: What for: completes "cannot …".
            hint: What the user should know besides.

        Raises:
            FileNotFoundError: There is no such object.
            StorageError: The store refuses, or cannot be reached.
        """
        from obstore import exceptions as refused

        where, begun = f"{self.url}{key}", time.monotonic()
        try:
            with waiting_for(f"{self.url} to answer"):
                yield
        except (FileNotFoundError, refused.NotFoundError) as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where) from error
        except refused.PreconditionError:  # no cause: what was made of it is of no use to whoever comes after
            raise StorageError(
                f"{where}: has changed while it was read: it is no longer the object that the folder's listing named.\n"
                "Is another program still writing this checkpoint? Try again when it is done."
            ) from None
        except (refused.BaseError, OSError) as error:  # of writers, the latter
            if time.monotonic() - begun > self.deadline and self._passes(error):
                self._give_up(error)
            why = ": the store refuses" if is_refusal(error) else ""
            text = "\n".join(filter(None, (f"{where}: cannot {doing}{why}.", said(error), hint, self._advice(error))))
            raise StorageError(text) from error

    def _advice(self, error: BaseException) -> str:
        found = next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, _head(error))), "")
        names = SCHEMES.get(self.url.partition(":")[0])
        return found or (f"Credentials, region and endpoint come from {names}, or --store-option." if names else "")


@lru_cache(maxsize=16)
def _client(
    top: str, settings: frozenset[tuple[str, str]], times: tuple[float, float, int, float], *_process: object
) -> Client:
    """One for all that is asked alike in a process: it takes 10 ms to make, of TLS' roots, and keeps the connections.

    Besides what is named it depends on the environment, and does not survive a fork; both are among the arguments.
    """
    from obstore import store

    answer, whole, retries, retry = times
    named = dict(settings)
    options: dict[str, Any] = {
        "allow_http": _is_plain_http(top.partition(":")[0], named),
        "read_timeout": timedelta(seconds=answer),
        "timeout": timedelta(seconds=whole),
    }
    options |= {name: _OF_REQUESTS[name](named.pop(name)) for name in _OF_REQUESTS.keys() & named.keys()}
    again: Any = {"max_retries": retries, "retry_timeout": timedelta(seconds=retry)}
    config: Any = named
    client: Client = store.from_url(top, config=config, client_options=options, retry_config=again)  # type: ignore[call-overload]
    return client


def _yes(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(f"should be true or false, found {text!r}")
    return text.lower() in ("true", "1")


_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def _seconds(text: str) -> float:
    """``30``, ``30s`` and ``0.5m`` are 30 seconds."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([a-z]*)", text.strip())
    seconds = float(found[1]) * _UNITS.get(found[2], 0.0) if found else 0.0
    if not seconds:
        raise ValueError(f"should be a duration such as 30s or 5m, found {text!r}")
    return seconds


def _duration(text: str) -> timedelta:
    return timedelta(seconds=_seconds(text))


_OF_REQUESTS: Mapping[str, Callable[[str], Any]] = {
    "allow_http": _yes, "allow_invalid_certificates": _yes, "connect_timeout": _duration, "proxy_url": str, "user_agent": str,
}  # fmt: skip

OF_REQUESTS = (*_OF_REQUESTS, "timeout")
"""Settings that are about requests, and not about the store. ``timeout`` is for how long one may take, with all that it is tried again.

Source: obstore 0.12.1, ``_store/_client.pyi`` (``ClientConfig``)."""


def _is_plain_http(scheme: str, settings: Mapping[str, str]) -> bool:
    """Whether the user names an endpoint without TLS, such as a server on the own machine; that is consent enough."""
    names = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("GOOGLE_BASE_URL",),
        "az": ("AZURE_STORAGE_ENDPOINT",),
    }
    named = [os.environ.get(name, "") for name in names.get(scheme, ())]
    named += [value for key, value in settings.items() if "endpoint" in key.lower() or "base_url" in key.lower()]
    return any(value.startswith("http://") for value in named)


def is_refusal(error: BaseException) -> bool:
    """Whether it is about rights; of listings the class does not say it."""
    return not lacks_credentials(error) and any(f"status code: {code}" in str(error) for code in (401, 403))


def lacks_credentials(error: BaseException | None) -> bool:
    """Whether the environment has none: then obstore asks the machine's own metadata service, which is no store."""
    return any(host in str(error) for host in ("://169.254.169.254", "://169.254.170.2", "://metadata.google.internal"))


_ANSWER = re.compile(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL)


def _head(error: BaseException | None) -> str:
    """What an error says, without what Rust says of its insides."""
    return str(error).partition("Debug source")[0].strip()


def said(error: BaseException | None) -> str:
    """What the store said, without its XML, and without where in Rust that arrived."""
    text = redacted(_head(error))
    if lacks_credentials(error):
        return "No credentials: the environment names none, and this machine has no role that would give them."
    answer = _ANSWER.search(text)
    return f"{answer[1]}: {answer[2]}" if answer else text
