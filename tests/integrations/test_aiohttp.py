"""aiohttp: a lock per request, free when the handler has ended, however it ended."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import pytest
from aiohttp import web

import aiolock
from aiolock.aiohttp import CLIENT, cleanup_ctx, locked
from tests.faults.staging import nothing_remains
from tests.integrations import web_servers
from tests.integrations.web_servers import PATIENCE, hang_up, until


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def app(deployment) -> web.Application:
    made = web.Application()
    made.cleanup_ctx.append(cleanup_ctx(deployment.url, namespace=deployment.namespace, ttl=5))
    return made


async def test_a_handler_holds_the_lock_while_it_runs(app, rival, http):
    @locked("order:{order_id}:{part}", timeout=0, retry_after=2.5)
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        taken = await rival.lock(lease.name).try_acquire() is None
        return web.json_response([lease.name, taken])

    class Refund(web.View):
        @locked(lambda request: f"refund:{int(request.match_info['order_id'])}")
        async def post(self, lease: aiolock.Lease) -> web.Response:
            return web.Response(text=lease.name)

    below = web.Application()
    below.router.add_get("/{order_id}/pay", pay)
    below.router.add_view("/{order_id}/refund", Refund)
    app.add_subapp("/orders", below)
    async with web_servers.aiohttp(app) as address:
        async with http.get(f"{address}/orders/7/pay?part=1") as response:
            assert await response.json() == ["order:7:1", True]
        async with rival.lock("order:7:1"), http.get(f"{address}/orders/7/pay?part=1") as response:
            assert response.status == 409
            assert response.headers["Retry-After"] == "3"
        async with http.post(f"{address}/orders/07/refund") as response:
            assert await response.text() == "refund:7"
        await nothing_remains(rival, "order:7:1")


async def test_a_handler_may_be_a_method(app, rival, http):
    class Shop:
        @locked("order:{order_id}", timeout=0)
        async def pay(self, request: web.Request, lease: aiolock.Lease) -> web.Response:
            assert isinstance(self, Shop)
            taken = await rival.lock(lease.name).try_acquire() is None
            return web.json_response([request.path, taken])

    app.router.add_post("/{order_id}", Shop().pay)
    async with web_servers.aiohttp(app) as address:
        async with http.post(f"{address}/7") as response:
            assert await response.json() == ["/7", True]
        async with rival.lock("order:7"), http.post(f"{address}/7") as response:
            assert response.status == 409


async def test_what_is_called_without_a_request_is_refused():
    @locked("order")
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        raise AssertionError("nobody gets here")

    with pytest.raises(aiolock.ConfigError, match="called with a request"):
        await pay("order")


async def test_the_client_lives_as_long_as_the_application(app, http):
    async def look(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT].lock("report"):
            return web.Response(text="done")

    app.router.add_get("/", look)
    async with web_servers.aiohttp(app) as address, http.get(address) as response:
        assert await response.text() == "done"
    with pytest.raises(RuntimeError, match="closed"):
        await app[CLIENT].lock("report").acquire()


async def test_a_loss_that_only_the_release_finds_is_answered_503(app, deployment, http):
    @locked("order:{order_id}")
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        await deployment.forget(lease)
        return web.Response(text="done")

    app.router.add_get("/{order_id}", pay)
    async with web_servers.aiohttp(app) as address, http.get(f"{address}/7") as response:
        assert response.status == 503


async def test_a_loss_cancels_the_handler_and_is_answered_503(app, rival, http):
    entered = asyncio.Event()

    @locked("order:{order_id}")
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError("it is cancelled")

    app.router.add_get("/{order_id}", pay)
    async with web_servers.aiohttp(app) as address:
        answer = asyncio.create_task(http.get(f"{address}/7"))
        await entered.wait()
        await rival.lock("order:7").force_release()
        async with await answer as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"


async def test_a_loss_in_the_middle_of_a_stream_ends_the_connection(app, rival, http, caplog):
    caplog.set_level(logging.CRITICAL, logger="aiohttp.server")

    @locked("order:{order_id}")
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await asyncio.Event().wait()
        return response

    app.router.add_get("/{order_id}", pay)
    async with web_servers.aiohttp(app) as address, http.get(f"{address}/7") as response:
        assert await response.content.readexactly(5) == b"first"
        await rival.lock("order:7").force_release()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_a_handler_whose_client_goes_away_gives_the_lock_back(app, rival):
    entered = asyncio.Event()
    ended: list[str] = []

    @locked("order:{order_id}")
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        raise AssertionError("it is cancelled")

    app.router.add_post("/{order_id}", pay)
    async with web_servers.aiohttp(app, handler_cancellation=True) as address:
        async with hang_up(address, "/7"):
            await entered.wait()
        await nothing_remains(rival, "order:7")
    assert ended == ["cancelled"]


async def test_a_client_that_goes_away_while_it_waits_gives_up_its_place(app, rival):
    @locked("order:{order_id}", timeout=PATIENCE)
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        raise AssertionError("nobody gets here")

    async def places() -> int:
        return len((await rival.lock("order:7").inspect()).waiters)

    async def somebody_waits() -> bool:
        return await places() == 1

    async def nobody_waits() -> bool:
        return await places() == 0

    app.router.add_post("/{order_id}", pay)
    async with web_servers.aiohttp(app, handler_cancellation=True) as address, rival.lock("order:7"):
        async with hang_up(address, "/7"):
            await until(somebody_waits, "the request waits")
        await until(nobody_waits, "the request has left the queue")


async def test_what_the_handler_raises_goes_on_as_it_is(app, rival, http):
    @locked("order:{order_id}")
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        raise web.HTTPPaymentRequired

    app.router.add_post("/{order_id}", pay)
    async with web_servers.aiohttp(app) as address, http.post(f"{address}/7") as response:
        assert response.status == 402
    await nothing_remains(rival, "order:7")


async def test_a_name_that_cannot_be_is_the_callers_mistake(app, http):
    @locked("{text}")
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        raise AssertionError("nobody gets here")

    app.router.add_post("/{text}", pay)
    async with web_servers.aiohttp(app) as address, http.post(f"{address}/{'x' * 1025}") as response:
        assert response.status == 422


async def test_a_request_that_lacks_a_part_of_the_name_is_the_callers_mistake(app, rival, http):
    @locked("order:{order_id}:{part}")
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        raise AssertionError("nobody gets here")

    app.router.add_post("/{order_id}", pay)
    async with web_servers.aiohttp(app) as address, http.post(f"{address}/7?prat=1") as response:
        assert (response.status, await response.text()) == (422, "The address lacks part.")


async def test_an_application_without_a_client_says_how_to_get_one(http, caplog):
    @locked("order")
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        raise AssertionError("nobody gets here")

    app = web.Application()
    app.router.add_post("/", pay)
    async with web_servers.aiohttp(app) as address, http.post(address) as response:
        assert response.status == 500
    assert "cleanup_ctx(url)" in caplog.text


def test_what_cannot_work_is_said_when_the_application_is_built():
    with pytest.raises(aiolock.ConfigError, match="async def"):

        @locked("report")
        def work(request: web.Request, lease: aiolock.Lease) -> None: ...

    with pytest.raises(aiolock.ConfigError, match="timeout"):
        locked("report", timeout="soon")
    with pytest.raises(aiolock.ConfigError, match="memory://"):
        cleanup_ctx("nowhere://")
    with pytest.raises(aiolock.ConfigError, match="options go with a URL"):
        cleanup_ctx(aiolock.connect("memory://"), ttl=3)


async def test_a_lazy_client_starts_without_its_server(http):
    @locked("order", timeout=0)
    async def pay(request: web.Request, lease: aiolock.Lease) -> web.Response:
        raise AssertionError("not reached")

    with web_servers.closed_port() as port:
        app = web.Application()
        app.cleanup_ctx.append(cleanup_ctx(f"redis://127.0.0.1:{port}/0", lazy=True, command_timeout=0.5))
        app.router.add_get("/pay", pay)
        async with web_servers.aiohttp(app) as address, http.get(f"{address}/pay") as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        waits = web.Application()
        waits.cleanup_ctx.append(
            cleanup_ctx(f"redis://127.0.0.1:{port}/0", wait_for_server=0.3, command_timeout=0.2)
        )
        with pytest.raises(aiolock.BackendUnavailable):
            async with web_servers.aiohttp(waits):
                pass
