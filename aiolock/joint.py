"""The lease of several locks: held while all of its parts are, lost with the first of them, released together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

from aiolock.contract import Claim, Grant, Kind, Release
from aiolock.errors import LockLost, LossReason, UnsupportedKind, shorten
from aiolock.lease import Home, Lease, Task
from aiolock.options import OnLoss
from aiolock.runtime import Runtime, State

__all__ = ["JointLease"]


class JointLease(Lease):
    """The hold of several locks, from :func:`lock_all`: a :class:`Lease` with ``parts``, and without a ``token``.

    It is certain for as long as all of its parts are, and lost with the first that is lost: then its block is cancelled,
    and at the end of the block, or with ``release()``, the others are given back. A part that was released by itself
    counts no more.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Lease], on_loss: OnLoss) -> None:
        # The term is never looked at: what would, is asked of the parts.
        super().__init__(_Bundle(tuple(parts)), parts[0]._term, on_loss, 0)  # noqa: SLF001 - a lease of leases
        del self.token
        self.parts: tuple[Lease, ...] = tuple(parts)
        """The holds, in the order in which they were taken; each with the token of its lock."""
        for part in self.parts:
            self.follow(part)
            if part.lost:
                self.mark_lost("expired")

    def __getattr__(self, name: str) -> NoReturn:
        if name == "token":
            raise AttributeError(
                "a lease of several locks has no token of its own: each of its parts has one"
            )
        raise AttributeError(name)

    @property
    def name(self) -> str:
        """The names of the locks, in the order in which they were taken."""
        return ", ".join(dict.fromkeys(part.name for part in self.parts))

    @property
    def kind(self) -> Kind:
        """What kind of hold the first part is."""
        return self.parts[0].kind

    @property
    def ttl(self) -> float:
        """The shortest ttl of its parts, in seconds."""
        return min(part.ttl for part in self.parts)

    def remaining(self) -> float:
        """Seconds for which all of them are still certain, by the local clock; 0 when one is not."""
        if not self.open:
            return 0.0
        return min((part.remaining() for part in self.parts if part.open or part.lost), default=0.0)

    @property
    def lost(self) -> bool:
        """Whether one of them ended before it was released."""
        return self._lost is not None or (not self._released and any(part.lost for part in self.parts))

    async def renew(self) -> None:
        """Ask for a full ttl of each part now. Raises and cancels as :meth:`Lease.renew` does."""
        self._home.runtime.guard()
        if not self.open:
            self.check()
        for part in self.parts:
            if part.open:
                await part.renew()
        self.check()

    def check(self) -> None:
        """Raise :class:`LockLost` if one of them is not certain, :class:`RuntimeError` if all of them were released."""
        if self.open and not any(part.open or part.lost for part in self.parts):
            raise RuntimeError(
                f"every part of the lease of {shorten(self.name)} was released: acquire the locks again"
            )
        super().check()

    async def release(self, keep: float = 0) -> None:
        """Give all of them back; idempotent. Raises and cancels as :meth:`Lease.release` does."""
        if self._released:
            return
        for part in self.parts:
            runtime = part.home.runtime
            if runtime.state is State.OPEN or runtime.forked:
                runtime.guard()
        if keep != 0:
            for part in self.parts:
                backend = part.home.runtime.backend
                if "keep" not in backend.capabilities:
                    raise UnsupportedKind("release(keep=…)", backend.name, "release without keep")
        await super().release(keep)

    async def downgrade(self) -> None:
        """Not of all of them together: each part that is a write lease can be downgraded."""
        raise RuntimeError("a lease of several locks cannot be downgraded: downgrade the part that is to be")

    def __repr__(self) -> str:
        return f"<JointLease of {', '.join(repr(part) for part in self.parts)}>"

    # --- for locks and queues

    def enter(self, task: Task, *, cancel: bool) -> None:
        """Begin a block of ``task``, which is one of every part."""
        super().enter(task, cancel=cancel)
        for part in self.parts:
            part.enter(task, cancel=False)

    def begin_block(self) -> None:
        """What would wait for one of them is refused in there."""
        for part in self.parts:
            part.begin_block()

    def end_block(self) -> None:
        """The block has ended for every part."""
        for part in self.parts:
            part.end_block()

    def leave(self, task: Task, error: BaseException | None) -> Coroutine[Any, Any, None] | None:
        """End a block: release, or say what the loss means for it. What is returned is to be awaited."""
        return self._leave(task, error)

    def abandon(self) -> None:
        """Give the holds back without waiting, each with the help of its own client."""
        for part in self.parts:
            part.abandon()
        super().abandon()

    def disown(self) -> bool:
        """Learn that a part was not ours any more when it was released, which that part has reported."""
        if self._lost is None and any(part.lost for part in self.parts):
            self._lost = "revoked"
            return True
        return False

    def expire(self) -> None:
        """The term of a part is over, and the watchdog has not come to say so."""
        for part in self.parts:
            if part.open and part.lost:
                part.expire()

    def mark_lost(self, reason: LossReason) -> None:
        """One of them was lost: so is this, and whoever works under it is told."""
        if self.open:
            super().mark_lost(reason)
            self.fire()

    def _loss(self) -> LockLost:
        for part in self.parts:
            if part.lost:
                return part._loss()  # noqa: SLF001 - the loss of this lease is the one of its part
        return super()._loss()


class _Bundle:
    """Where a joint lease goes back to: the homes of its parts."""

    def __init__(self, parts: tuple[Lease, ...]) -> None:
        self.runtime: Runtime = parts[0].home.runtime
        self._parts = parts

    @property
    def kind(self) -> Kind:
        """That of the first."""
        return self._parts[0].kind

    def leave(self, lease: Lease, keep: float = 0) -> Claim | None:  # noqa: ARG002 - there is one lease for a bundle
        """End the turns of all; what is left to release is one claim for whoever releases it."""
        claims = [(part, claim) for part in self._parts if (claim := part.give_back(keep)) is not None]
        return _Several(claims) if claims else None

    def shared(self) -> bool:
        """Never asked: every part stands for itself."""
        return False

    def weaken(self, lease: Lease) -> Home:
        """Never asked: a joint lease refuses it."""
        raise RuntimeError(f"{shorten(lease.name)} cannot be downgraded as one")


class _Several(Claim):
    """Claims that are released together, each by the client of its lease: another one of them may be closed by now."""

    __slots__ = ("_claims",)

    def __init__(self, claims: Sequence[tuple[Lease, Claim]]) -> None:
        super().__init__(max((claim.bid for _, claim in claims), key=lambda bid: bid.ttl))
        self._claims = dict.fromkeys(claims)
        """Those that no client sees to yet."""

    async def attempt(self, wait: bool) -> Grant | None:  # noqa: ARG002 - they were asked for one by one
        """Never asked."""
        return None

    async def changed(self) -> None:
        """Never waited for."""

    async def release(self, keep: float = 0) -> Release:
        """Release all of them at the same time; what a client cannot release now, it goes on trying."""
        try:
            results = await asyncio.gather(
                *(self._one(part, claim, keep) for part, claim in self._claims), return_exceptions=True
            )
        except BaseException:
            # Those whose turn had not come: a task that is cancelled before its first step never runs.
            for part, claim in self._claims:
                part.home.runtime.clean_up(claim, keep, part)
            self._claims.clear()
            raise
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return Release.NOT_OURS if any(results) else Release.RELEASED

    async def _one(self, part: Lease, claim: Claim, keep: float) -> bool:
        del self._claims[part, claim]
        return await part.home.runtime.release(claim, part, keep)
