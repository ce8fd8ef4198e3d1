"""What lies between a client and an object store: a TCP proxy that resets, cuts, refuses, or says nothing."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_CHUNK = 16 << 10


@dataclass
class Proxy:
    """It, and how it behaves from now on.

    Args:
        upstream: Port of the store.
        rng: Decides what is reset.
        reset: Share of chunks, either way, at which the connection is reset.
        cut: Share of chunks of answers that are cut in the middle, with an end as if all were well.
        refuse: Whether connections are reset at once.
        silent: Whether nothing is passed on; connections stay.
    """

    upstream: int
    rng: random.Random
    reset: float = 0.0
    cut: float = 0.0
    refuse: bool = False
    silent: bool = False
    url: str = ""
    met: set[object] = field(default_factory=set)
    done: dict[str, int] = field(default_factory=lambda: {"reset": 0, "cut": 0, "refused": 0, "silent": 0})

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        self.met.add(
            asyncio.current_task()
        )  # the loop itself holds no task: one that waits would be collected with its streams
        if self.refuse:
            self._note("refused")
            _reset(writer)
            return
        there, back = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            await asyncio.gather(self._pass(reader, back, writer), self._pass(there, writer, back, answers=True))
        except (OSError, asyncio.CancelledError):  # a connection that the other side reset cannot be shut down
            pass
        finally:
            writer.transport.abort()
            back.transport.abort()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        *,
        answers: bool = False,
    ) -> None:
        while data := await reader.read(_CHUNK):
            while self.silent:
                self._note("silent")
                await asyncio.sleep(0.05)
            if self.rng.random() < self.reset:
                self._note("reset")
                _reset(writer)
                _reset(other)
                raise ConnectionError
            if answers and len(data) > 1 and self.rng.random() < self.cut:
                self._note("cut")
                writer.write(data[: len(data) // 2])
                await writer.drain()
                raise ConnectionError
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    def _note(self, what: str) -> None:
        self.done[what] += 1


def _reset(writer: asyncio.StreamWriter) -> None:
    found: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def between(store: str, rng: random.Random) -> Iterator[Proxy]:
    """A proxy before a store, on a thread of its own.

    Args:
        store: The store's URL.
        rng: Decides what fails.
    """
    proxy = Proxy(urlsplit(store).port or 0, rng)
    loop, is_up = asyncio.new_event_loop(), threading.Event()

    async def serve() -> asyncio.Server:
        server = await asyncio.start_server(proxy.meet, "127.0.0.1", 0)
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        is_up.set()
        return server

    def run() -> None:
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(serve())
        loop.run_forever()
        server.close()
        while tasks := asyncio.all_tasks(loop):  # one that ends may have begun another
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(asyncio.sleep(0))  # transports close a turn later
        loop.close()

    thread = threading.Thread(target=run, name="proxy", daemon=True)
    thread.start()
    assert is_up.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
