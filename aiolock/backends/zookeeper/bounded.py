"""A step that asks the ensemble: within the command timeout, with errors of ours instead of aiozk's."""

from __future__ import annotations

import asyncio
from types import TracebackType

from aiozk import exc

from aiolock.backends.zookeeper.address import Address
from aiolock.backends.zookeeper.outcomes import translate
from aiolock.errors import BackendUnavailable

__all__ = ["Bounded"]


class Bounded:
    """For one ``async with``; a generator would cost as much as the timeout itself."""

    __slots__ = ("_address", "_limit", "_seconds")

    def __init__(self, address: Address, seconds: float) -> None:
        self._address = address
        self._seconds = seconds
        self._limit = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        late: BaseException | None = error if isinstance(error, TimeoutError) else None
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as ended:
            late = ended
        if late is not None:
            raise BackendUnavailable(f"{self._address} did not answer within {self._seconds:g} s") from late
        if isinstance(error, exc.ZKError):
            raise translate(error) from error
