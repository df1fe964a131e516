"""A request to another server and its answer, by HTTP/1.1 in the event loop: who waits for it may leave at any time."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from functools import cache
from typing import Self
from urllib.parse import urlsplit

import h11

BLOCK = 1 << 16

FAILURES = (OSError, h11.RemoteProtocolError)  # of a server that cannot be reached, is silent, or breaks off


class Exchange:
    """An answer whose head has come.

    status, headers:  of the answer; names in lower case
    silence:          seconds that the server may say nothing
    """

    status: int
    headers: Mapping[str, str]

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float) -> None:
        self._reader, self._writer, self._silence = reader, writer, silence
        self._http = h11.Connection(h11.CLIENT)

    @classmethod
    async def begin(cls, url: str, headers: Mapping[str, str], body: bytes, silence: float) -> Self:
        """Posts a body. Raises: one of FAILURES."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        async with asyncio.timeout(silence):
            context = await asyncio.to_thread(_trust) if secure else None
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
        exchange = cls(reader, writer, silence)
        try:
            host = parts.netloc.rpartition("@")[2]
            told = {"Host": host, "Connection": "close", "Content-Length": str(len(body)), **headers}
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            exchange._write(h11.Request(method="POST", target=target, headers=list(told.items())))
            exchange._write(h11.Data(data=body))
            exchange._write(h11.EndOfMessage())
            await exchange._head()
        except BaseException:
            exchange.close()
            raise
        return exchange

    def _write(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")

    async def _head(self) -> None:
        async with asyncio.timeout(self._silence):
            await self._writer.drain()
        event = await self._event()
        while isinstance(event, h11.InformationalResponse):
            event = await self._event()
        if not isinstance(event, h11.Response):
            raise h11.RemoteProtocolError("the server closed the connection")
        self.status = event.status_code
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}

    async def _event(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(self._silence):
                self._http.receive_data(await self._reader.read(BLOCK))
        return event  # type: ignore[return-value]

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises: one of FAILURES."""
        while isinstance(event := await self._event(), h11.Data):
            yield bytes(event.data)

    async def whole(self, most: int) -> bytes:
        """The body, or so many first bytes of it. Raises: one of FAILURES."""
        found, size = [], 0
        async for part in self.parts():
            found.append(part)
            if (size := size + len(part)) >= most:
                break
        return b"".join(found)[:most]

    def close(self) -> None:
        """Ends the connection, whatever is still to come."""
        self._writer.transport.abort()


@cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()


async def events(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same bytes, cut behind the empty lines that end events, so that something may be said in between."""
    held = b""
    async for part in parts:
        held += part
        if end := max(held.rfind(mark) + len(mark) if mark in held else 0 for mark in (b"\n\n", b"\r\n\r\n")):
            yield held[:end]
            held = held[end:]
    if held:
        yield held
