"""What any other client of the server can write: messages on our channel, keys in our namespace."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.staging import queued, until

NUMBER = "7" * 5000


@pytest.mark.parametrize(
    "words",
    [
        "g {} a b c d e",
        "g {} \u00b2 1 1 1 1",
        f"g {{}} {NUMBER} 1 1 1 1",
        f"g {{}} 1 1 {'7' * 400} 1 1",
        "g {} 1",
        "a {}",
        "a {} x",
        "a {} x reason",
        f"a {{}} {NUMBER} reason",
        "",
        "g",
        "n",
        "c",
    ],
)
async def test_a_message_that_no_script_wrote_is_dropped(admin, connect, server, words):
    async with connect(server.url) as one, connect(server.url) as other:
        backend = one._backend
        channel = backend._channel
        generation = backend._server.subscriber.generation
        async with other.lock("waited"), one.lock("held") as held:
            waiter = asyncio.create_task(one.lock("waited").acquire())
            await queued(other.lock("waited"), 1)
            for claim in list(backend.claims.values()):
                for payload in (words.format(claim.request_id), words.format("nobody:1")):
                    await admin.publish(channel, payload.encode() + b"\xff")
            # The order of one channel: when this has arrived, so have they.
            assert await other.lock("held").request_release("really")
            await until(lambda: held.release_requested)
        await (await waiter).release()
        assert backend._server.subscriber.generation == generation


@pytest.mark.parametrize("name", ["%d800;", "%41;", "%zz;", ""])
async def test_keys_that_no_lock_has_are_not_listed(admin, connect, server, namespace, name):
    async with connect(server.url) as client, client.lock("mine"):
        key = client._backend._mutex.commands.key("mine", client.lock("mine").kind.family)
        for foreign in (key.replace("mine", name), key.replace("mine", name).replace(":lock:", ":rw:")):
            await admin.hset(foreign, mapping={"value": "x"})
        assert [info.name for info in await client.locks()] == ["mine"]
