"""Several locks at once: what is free is had in one round trip, whatever kinds there are."""

from __future__ import annotations

import aiolock


async def test_free_locks_of_all_kinds_are_had_in_one_round_trip(connect, server, monkeypatch):
    async with connect(server.url) as client:

        def locks(turn: int) -> list[aiolock.Lock]:
            return [
                client.lock(f"a {turn}"),
                client.rwlock(f"b {turn}").read(),
                client.rwlock(f"c {turn}").write(),
                client.semaphore(f"d {turn}", 3),
                client.lock(f"e {turn}"),
            ]

        # The server learns the scripts.
        async with aiolock.lock_all(*locks(0)):
            pass
        connection = client._backend._server.connection
        written: list[int] = []
        answered: list[int] = []
        write, received = connection._write, connection.data_received

        def counted_write(transport, data) -> None:
            written.append(len(answered))
            write(transport, data)

        def counted_answer(data: bytes) -> None:
            answered.append(len(data))
            received(data)

        monkeypatch.setattr(type(connection), "_write", lambda _, *words: counted_write(*words))
        monkeypatch.setattr(type(connection), "data_received", lambda _, data: counted_answer(data))
        lease = await aiolock.lock_all(*locks(1)).acquire()
        # All that was sent was sent before anything was answered.
        assert written
        assert answered
        assert set(written) == {0}
        assert len(lease.parts) == 5
        monkeypatch.undo()
        await lease.release()
