"""A lock around the handler of a request: what is asked for, and the block whose troubles become responses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypedDict

from aiolock.answers import ANSWERED, RETRY_AFTER, TIMEOUT, Answer, answer
from aiolock.client import Client
from aiolock.errors import ConfigError, LockLost, shorten
from aiolock.frames import owns_block
from aiolock.lease import Lease
from aiolock.names import check_label
from aiolock.options import (
    OnLoss,
    check_flag,
    check_max_hold,
    check_on_loss,
    check_seconds,
    check_timeout,
    check_ttl,
)

__all__ = ["Block", "MakeLock", "Wish", "WishOptions"]

MakeLock = Callable[[Client, str], AbstractAsyncContextManager[Lease]]
"""A function from a client and a name to whatever lock is wanted, such as the read lock of a pair."""

Refuse = Callable[[Answer], Exception]


class WishOptions(TypedDict, total=False):
    """The options of ``locked`` in every web framework."""

    timeout: float | None
    ttl: float | None
    on_loss: OnLoss | None
    fair: bool
    max_hold: float | None
    label: str | None
    retry_after: float
    lock: MakeLock | None


class Wish:
    """What the handlers of one route ask for; checked once, when the application is built."""

    def __init__(self, options: WishOptions) -> None:
        unknown = sorted(set(options) - set(WishOptions.__annotations__))
        if unknown:
            raise ConfigError(
                f"locked() has no option {', '.join(unknown)}; it has {', '.join(WishOptions.__annotations__)}"
            )
        self.retry_after: float = check_seconds("retry_after", options.get("retry_after", RETRY_AFTER), 0)
        ttl, on_loss, label = options.get("ttl"), options.get("on_loss"), options.get("label")
        self._options: dict[str, Any] = {
            "timeout": check_timeout(options.get("timeout", TIMEOUT)),
            "ttl": None if ttl is None else check_ttl(ttl),
            "on_loss": None if on_loss is None else check_on_loss(on_loss),
            "fair": check_flag("fair", options.get("fair", False)),
            "max_hold": check_max_hold(options.get("max_hold")),
            "label": None if label is None else check_label(label),
        }
        lock = options.get("lock")
        if lock is not None and not callable(lock):
            raise ConfigError(
                f"lock must be a function of a client and a name that returns a lock, not {shorten(lock)}"
            )
        given = sorted(set(options) - {"lock", "retry_after"})
        if lock is not None and given:
            raise ConfigError(
                f"{', '.join(given)}: with lock=, options go to the lock that the function makes"
            )
        self._make: Any = lock

    def block(self, client: Client, name: str, refuse: Refuse, *, signal: bool = False) -> Block:
        """The block for one request; with ``signal``, a loss does not cancel the task that enters it."""

        def lock() -> AbstractAsyncContextManager[Lease]:
            if self._make is not None:
                made: AbstractAsyncContextManager[Lease] = self._make(client, name)
                return made
            on_loss: OnLoss | None = "signal" if signal else self._options["on_loss"]
            mutex: AbstractAsyncContextManager[Lease] = client.lock(
                name, **{**self._options, "on_loss": on_loss}
            )
            return mutex

        return Block(lock, self.retry_after, refuse)


class Block:
    """``async with`` a lock, with errors that a web framework understands.

    Where a framework wants a generator around it, the loss of the lease cancels the handler all the same.
    """

    __slots__ = ("_lock", "_make", "_refuse", "_retry_after")

    def __init__(
        self,
        make: Callable[[], AbstractAsyncContextManager[Lease]],
        retry_after: float,
        refuse: Refuse,
    ) -> None:
        self._make = make
        self._retry_after = retry_after
        self._refuse = refuse
        self._lock: AbstractAsyncContextManager[Lease]

    @owns_block
    async def __aenter__(self) -> Lease:
        """Wait for the lock. Cancelling it leaves nothing behind."""
        try:
            self._lock = self._make()
            return await self._lock.__aenter__()
        except ANSWERED as error:
            raise self._refusal(error) from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, as the end of every block does; what the handler raised goes on as it is."""
        try:
            await self._lock.__aexit__(kind, error, trace)
        except LockLost as loss:
            raise self._refusal(loss) from loss

    def _refusal(self, error: Exception) -> Exception:
        said = answer(error, self._retry_after)
        return error if said is None else self._refuse(said)
