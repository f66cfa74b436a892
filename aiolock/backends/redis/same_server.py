"""Find out whether the subscription of a client is at the server of its commands.

A name may come to mean another server: by a failover, a proxy, a service or DNS. One of the two connections then stays where
it is, and brings messages of a server that the lock is not at: an earlier primary, or a replica, to which replication
carries all messages. So a grant that is pushed is believed only once both are known to be at the same server.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from aiolock.backends.redis.commands import Reply
from aiolock.backends.redis.connection import Connection
from aiolock.backends.redis.pubsub import Subscriber
from aiolock.backends.redis.run_id import RunId, agree
from aiolock.backends.transport import FIRST_PAUSE, ConnectionState
from aiolock.core.logs import Log, get_logger
from aiolock.core.tasks import Backoff
from aiolock.errors import BackendRefused

__all__ = ["SameServer"]

log: Log = get_logger("aiolock")

LONGEST_PAUSE = 30.0
"""Most seconds between subscriptions that turn out to be at another server."""


class SameServer:
    """The servers of the two connections of one client; a subscription at another one is given up and made anew.

    :param ids: run ids of the servers of the commands and of the messages.
    :param count: asks the server of the commands how many are subscribed to the channel of this client.
    :param untold: is called where the account may ask for neither: what is pushed can then never be believed.
    """

    def __init__(
        self,
        connection: Connection,
        subscriber: Subscriber,
        ids: tuple[RunId, RunId],
        count: Callable[[], Reply],
        untold: Callable[[], object],
        random: Random,
    ) -> None:
        self._connection = connection
        self._subscriber = subscriber
        self._ids = ids
        self._count = count
        self._untold = untold
        self._backoff = Backoff(random, FIRST_PAUSE, LONGEST_PAUSE)
        self._logged = False
        self.known = False
        """Both connections are known to be at the same server, so what is pushed is true of the lock."""

    def check(self) -> None:
        """Find out anew: one of the connections has come up."""
        self.known = False
        connection, subscriber = self._connection, self._subscriber
        if connection.state is not ConnectionState.READY or not subscriber.subscribed:
            return
        commands, messages = self._ids
        same = agree(commands.value, messages.value)
        if same is not None:
            self._found(same=same)
            return
        generations = connection.generation, subscriber.generation

        def counted(reply: Reply) -> None:
            if reply.cancelled() or not subscriber.subscribed:
                return
            if generations != (connection.generation, subscriber.generation):
                return
            error = reply.exception()
            if error is None:
                self._found(same=reply.result()[1] > 0)
            elif isinstance(error, BackendRefused):
                # Messages may be those of another server for ever, so that no push of the server of the commands arrives.
                self._untold()

        self._count().add_done_callback(counted)

    def _found(self, *, same: bool) -> None:
        self.known = same
        if same:
            self._backoff.reset()
            self._logged = False
            return
        pause = self._backoff.next() if self._logged else 0.0
        if not self._logged:
            self._logged = True
            log.warning(
                "%s: messages come from another server than the one that commands go to, such as a replica or an earlier primary: "
                "until a new subscription is at the same server, waiters ask every 100 ms",
                self._connection.address,
            )
        self._subscriber.give_up(pause)
