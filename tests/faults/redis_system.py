"""The Redis of a history run: what it is started with, how its frames look, what hurts it, and what it must not keep."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import redis

import aiolock
from aiolock.backends.redis.commands import SCRIPTS
from aiolock.backends.transport import LONGEST_PAUSE
from aiolock.testing.locks import FAMILIES, all_can_be_had
from tests.faults.proxy import resp_frames
from tests.faults.system import System
from tests.servers import Redis

USERS = (
    "user default on nopass ~* &* +@all",
    "user asks on >asks ~* &* +@all -subscribe",
    "user mute on >mute ~* resetchannels +@all",
)
"""Most workers are the first; `asks` hears of no grant, `mute` neither hears of grants nor can tell others of theirs."""

RENEWS = frozenset(SCRIPTS[name].sha.encode() for name in ("renew", "many_renew"))
REPLAYABLE = RENEWS | {
    SCRIPTS[name].sha.encode() for name in ("release", "leave", "many_release", "many_leave")
}


class RedisSystem(System):
    """One private server, without persistence unless asked for, and an administrator's connection that no proxy can hurt."""

    framing = staticmethod(resp_frames)

    def __init__(self, *, server: Redis | None = None, **options: Any) -> None:
        super().__init__(Redis(users=USERS, **options) if server is None else server)
        self._sent: deque[tuple[float, bytes]] = deque(maxlen=10_000)

    @staticmethod
    def verified_within(ttl: float) -> float:
        """Seconds after which every client has found out that the server lost its data; docs/backends/redis.md."""
        return max(LONGEST_PAUSE, ttl / 3) + 0.25

    def url(self, host: str, port: int, number: int, seed: int) -> str:
        """Where a worker connects; every eighth hears of nothing."""
        user = ("asks:asks@", "mute:mute@")[seed % 2] if number % 8 == 7 else ""
        return f"redis://{user}{host}:{port}/0"

    def admin(self) -> redis.Redis:
        """A new connection over the socket."""
        return redis.Redis(unix_socket_path=self.server.socket, socket_timeout=5)

    # --- what a frame means; `down` comes from the server

    @staticmethod
    def placed(direction: str, frame: bytes) -> bool:
        """Somebody is told of a place in line."""
        return direction == "down" and frame.startswith(b"*5\r\n:0\r\n")

    @staticmethod
    def granted(direction: str, frame: bytes) -> bool:
        """Somebody who waits is told that it has the lock."""
        return direction == "down" and frame.startswith(b"*3\r\n$7\r\nmessage\r\n") and b"\r\ng " in frame

    @staticmethod
    def reply(frame: bytes) -> bool:
        """The answer to a request for a lock."""
        return frame.startswith(b"*5\r\n:")

    def overhear(self, direction: str, frame: bytes) -> None:
        """Keep what renews and gives up holds, to send it again when it means nothing any more."""
        if direction == "up" and frame.partition(b"$40\r\n")[2][:40] in REPLAYABLE:
            self._sent.append((time.monotonic(), frame))

    # --- what hurts

    def kill_clients(self, kind: str, ending: Callable[[int], object]) -> None:
        """Close all connections of a kind from the server's side; no hold ends with them, so `ending` has nothing to note."""
        del ending
        with self.admin() as admin:
            admin.execute_command("CLIENT", "KILL", "TYPE", kind)

    def forget_scripts(self) -> None:
        """SCRIPT FLUSH."""
        with self.admin() as admin:
            admin.script_flush()

    def replay(self, *, older: float, most: int) -> int:
        """Send again what holders sent so many seconds ago: as late packets do, it must change nobody's hold."""
        with self.admin() as admin:
            done = 0
            while done < most and self._sent and time.monotonic() - self._sent[0][0] > older:
                done += self._replay(admin, self._sent.popleft()[1])
            self.replayed += done
            return done

    def _replay(self, admin: redis.Redis, frame: bytes) -> bool:
        reader = hiredis.Reader()
        reader.feed(frame)
        _, sha, count, *words = reader.gets()
        keys, arguments = words[: int(count)], words[int(count) :]
        requests = arguments[: 2 * len(keys) : 2] if sha in RENEWS else arguments[:1]
        if any(request in _holds(admin.hgetall(key)) for key, request in zip(keys, requests, strict=True)):
            return False  # a hold that ran out and that nobody else wanted is still its owner's
        with admin.pipeline(transaction=True) as step:
            for key in keys:
                step.hgetall(key)
            step.execute_command("EVALSHA", sha, len(keys), *keys, *arguments)
            for key in keys:
                step.hgetall(key)
            answers = step.execute(raise_on_error=False)
        before, after = map(_holds, answers[: len(keys)]), map(_holds, answers[len(keys) + 1 :])
        for key, request, was, became in zip(keys, requests, before, after, strict=True):
            if was != became and request not in was:
                self.foreign.append(f"ownership: {request!r} changed {key!r} from {was} to {became}")
        return True

    # --- what must be left: nothing

    async def hygiene(self, names: Sequence[str], ttl: float) -> list[str]:
        """After all workers have left: nobody alive is known; every lock can be had; then nobody holds, waits or listens."""
        found = self.alive()
        async with aiolock.connect(self.server.url, namespace=self.namespace, ttl=5) as client:
            found += await all_can_be_had(client, names, 3 * ttl)
        return found + await self.left()

    def alive(self) -> list[str]:
        """Whoever still holds or waits."""
        with self.admin() as admin:
            return [
                f"hygiene: {alive} in {key!r}"
                for key in admin.scan_iter()
                for alive in self._alive(admin, key)
            ]

    async def left(self) -> list[str]:
        """Whoever still listens or is connected, and what the keys have that nobody needs."""
        found: list[str] = []
        with self.admin() as admin:
            for _ in range(100):
                channels, clients = admin.pubsub_channels(), self.others(admin)
                if not channels and not clients:
                    break
                await asyncio.sleep(0.02)
            found += [f"hygiene: somebody still listens to {channel!r}" for channel in channels]
            found += [f"hygiene: still connected: {client['name'] or client['addr']}" for client in clients]
            for key in admin.scan_iter():
                found += [f"hygiene: {complaint} in {key!r}" for complaint in self._left(admin, key)]
        return found

    def others(self, admin: redis.Redis) -> list[dict[str, Any]]:
        """Who is connected, beside who asks."""
        return [one for one in admin.client_list() if one["cmd"] != "client|list" and one["cmd"] != "client"]

    @staticmethod
    def _alive(admin: redis.Redis, key: bytes) -> list[str]:
        """Holds and places that have not run out: of killed workers there are none by now, so they are of the others."""
        seconds, microseconds = admin.time()
        now = seconds * 1_000_000 + microseconds
        fields = admin.hgetall(key)
        places = [
            field for field, value in fields.items() if field[:2] == b"p:" and int(value.split()[0]) > now
        ]
        return [
            f"{field.decode()} = {fields[field].decode()} was left"
            for field in (
                *places,
                *([b"owner"] if b"owner" in fields and int(fields[b"until"]) > now else []),
                *(field for field in fields if field[:2] == b"h:" and int(fields[field].split()[0]) > now),
            )
        ]

    def _left(self, admin: redis.Redis, key: bytes) -> list[str]:
        if key == f"{self.namespace}:format".encode():
            # The one key that stays.
            return []
        fields = admin.hgetall(key)
        left = [
            f"field {field!r}"
            for field in fields
            if field == b"owner" or field[:2] in {b"h:", b"q:", b"r:", b"p:"}
        ]
        if admin.pttl(key) < 0:
            left.append("no expiry")
        if not key.startswith(
            tuple(f"{self.namespace}:1:{family}:".encode() for family in FAMILIES.values())
        ):
            left.append("a foreign name")
        return left


def _holds(fields: dict[bytes, bytes]) -> dict[bytes, object]:
    """What each request holds of a lock, whichever kind that is."""
    many_of = {field[2:]: value for field, value in fields.items() if field[:2] == b"h:"}
    if b"owner" in fields:
        return {fields[b"owner"]: (fields[b"until"], fields[b"token"]), **many_of}
    return dict(many_of)
