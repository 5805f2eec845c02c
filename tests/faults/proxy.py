"""A TCP proxy that can fall silent: it stops to forward, while its kernel goes on to answer keepalives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any

from localservers import free_port

if TYPE_CHECKING:
    from typing_extensions import Self


class Proxy:
    """Stands before a port of this machine, on a port of its own, for the length of a `with` block."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._delay = 0.0
        self._is_cut = False
        #: How many connections were closed at once.
        self.refused = 0
        self._connections: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stall(self) -> None:
        """Keep all that arrives from now on. Connections stay open, and new ones are accepted."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def cut(self) -> None:
        """Close all connections, and new ones as soon as they come."""
        self._is_cut = True
        self._run(self._close_connections())

    def resume(self) -> None:
        """Forward what was kept, and all that follows."""
        self._is_cut = False
        self._loop.call_soon_threadsafe(self._flowing.set)

    def delay(self, seconds: float) -> None:
        """Let each direction take so long."""
        self._delay = seconds

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _open(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _close(self) -> None:
        self._server.close()
        await self._close_connections()

    async def _close_connections(self) -> None:
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            self.refused += 1
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        far_writer = None
        try:
            await self._flowing.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            await asyncio.gather(self._forward(reader, far_writer), self._forward(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            for each in (writer, far_writer):
                if each is not None:
                    each.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one direction, and its end."""
        while data := await reader.read(65536):
            await self._flowing.wait()
            if self._delay:
                await asyncio.sleep(self._delay)
            writer.write(data)
            await writer.drain()
        await self._flowing.wait()
        writer.write_eof()
