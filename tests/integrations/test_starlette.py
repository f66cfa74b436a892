"""Starlette without FastAPI: the same life of the client, and a decorator instead of a dependency."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route

import aiolock
from aiolock.starlette import client_of, exception_handlers, lifespan, locked
from tests.integrations.web_servers import asgi, closed_port


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


def application(deployment, *routes: Route | Mount) -> Starlette:
    return Starlette(
        routes=routes,
        lifespan=lifespan(deployment.url, namespace=deployment.namespace),
        exception_handlers=exception_handlers,
    )


async def test_an_endpoint_holds_the_lock_while_it_runs(deployment, rival, http):
    @locked("order:{order_id}:{part}", timeout=0, retry_after=2.5)
    async def pay(request: Request, lease: aiolock.Lease) -> JSONResponse:
        return JSONResponse([lease.name, await rival.lock(lease.name).try_acquire() is None])

    class Refund(HTTPEndpoint):
        @locked("refund:{order_id}")
        async def post(self, request: Request, lease: aiolock.Lease) -> PlainTextResponse:
            return PlainTextResponse(lease.name)

    routes = [Route("/{order_id:int}/pay", pay), Route("/{order_id:int}/refund", Refund)]
    async with asgi(application(deployment, Mount("/orders", routes=routes))) as address:
        async with http.get(f"{address}/orders/07/pay?part=1") as response:
            assert await response.json() == ["order:7:1", True]
        async with rival.lock("order:7:1"), http.get(f"{address}/orders/7/pay?part=1") as response:
            assert response.status == 409
            assert response.headers["Retry-After"] == "3"
        async with http.post(f"{address}/orders/7/refund") as response:
            assert await response.text() == "refund:7"


async def test_a_loss_cancels_the_endpoint_and_is_answered_503(deployment, rival, http):
    entered = asyncio.Event()

    @locked(lambda request: request.path_params["name"])
    async def work(request: Request, lease: aiolock.Lease) -> PlainTextResponse:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError("it is cancelled")

    async with asgi(application(deployment, Route("/{name}", work))) as address:
        answer = asyncio.create_task(http.get(f"{address}/report"))
        await entered.wait()
        await rival.lock("report").force_release()
        async with await answer as response:
            assert response.status == 503


async def test_locks_that_an_endpoint_takes_by_itself_have_answers_as_well(deployment, rival, http):
    async def work(request: Request) -> PlainTextResponse:
        async with client_of(request).lock("report", timeout=0):
            return PlainTextResponse("done")

    async with asgi(application(deployment, Route("/", work))) as address:
        async with http.get(address) as response:
            assert response.status == 200
        async with rival.lock("report"), http.get(address) as response:
            assert response.status == 409


async def test_a_request_that_lacks_a_part_of_the_name_is_the_callers_mistake(deployment, http):
    @locked("order:{order_id}:{part}")
    async def pay(request: Request, lease: aiolock.Lease) -> PlainTextResponse:
        raise AssertionError("nobody gets here")

    app = application(deployment, Route("/{order_id:int}", pay))
    async with asgi(app) as address, http.get(f"{address}/7?prat=1") as response:
        assert (response.status, await response.text()) == (422, "The address lacks part.")


def test_an_endpoint_in_a_thread_is_refused():
    with pytest.raises(aiolock.ConfigError, match="async def"):

        @locked("report")
        def work(request: Request, lease: aiolock.Lease) -> None: ...


async def test_a_lazy_client_starts_without_its_server(http):
    @locked("order", timeout=0)
    async def pay(request: Request, lease: aiolock.Lease) -> PlainTextResponse:
        raise AssertionError("not reached")

    with closed_port() as port:
        source = lifespan(f"redis://127.0.0.1:{port}/0", lazy=True, command_timeout=0.5)
        async with (
            asgi(Starlette(routes=[Route("/pay", pay)], lifespan=source)) as address,
            http.get(f"{address}/pay") as response,
        ):
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        with pytest.raises(aiolock.BackendUnavailable):
            async with lifespan(f"redis://127.0.0.1:{port}/0", wait_for_server=0.3, command_timeout=0.2)(
                Starlette()
            ):
                pass
