"""The etcd backend: the engine over rows, on keys of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiolock.backends.etcd.diagnosis import diagnose
from aiolock.backends.etcd.store import EtcdStore
from aiolock.backends.etcd.url import parameters
from aiolock.backends.rows.backend import RowBackend
from aiolock.backends.rows.claim import RowClaim
from aiolock.core.capabilities import FencedPut
from aiolock.errors import BackendUnavailable, LockLost, forgets_arguments, shorten
from aiolock.types import Finding

__all__ = ["EtcdBackend"]


class EtcdBackend(RowBackend, FencedPut[RowClaim]):
    """One etcd cluster (3.4 or later).

    :param url: ``etcd://user:password@h1:2379,h2:2379,h3:2379``: some or all members. The other options may also stand in
        its query, as far as they are text.
    :param tls: ``True`` verifies the members by the authorities of the system or of ``tls_ca``; or an
        :class:`ssl.SSLContext`, which is set to offer HTTP/2.
    :param tls_ca: a file with the authorities that certificates are verified with.
    :param tls_cert: a file with the certificate of the client; ``tls_key`` is a file with its key, if that is another one.
    """

    name = "etcd"

    store: EtcdStore

    @forgets_arguments
    def __init__(
        self, url: str, *, tls: Any = None, tls_ca: Any = None, tls_cert: Any = None, tls_key: Any = None
    ) -> None:
        options = {"tls": tls, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
        self._members = parameters(url, options)
        self.address = self._members.text

    def make_store(self) -> EtcdStore:
        """Return the store of this opening."""
        return EtcdStore(self._members)

    async def fenced_put(self, claim: RowClaim, key: str, value: bytes, check: Callable[[], None]) -> int:
        """Set the key if the row of the lock has not changed since a read that shows the hold.

        Raises what ``check`` raises, :class:`LockLost` if the row does not show the hold, and :class:`BackendError`. Cancelling it
        leaves open whether it was set.
        """
        name, deadline = claim.request.name, self.context.deadline()
        while deadline.left():
            [row], _ = await self.context.get([claim.key])
            # The hold may have been released or lost meanwhile, and the client may have handed it to its next task.
            check()
            if not claim.shown_in(row.value):
                raise LockLost(name, "revoked")
            revision = await self.store.put_while_shown(key, value, claim.key, row.version)
            if revision is not None:
                return revision
            # Another client joined or left the queue meanwhile: nothing was written.
        raise BackendUnavailable(
            f"the row of {shorten(name)} was changed again and again: nothing was written"
        )

    async def examine(self) -> list[Finding]:
        """Diagnose the members over new connections."""
        return await diagnose(self._members, self.settings)
