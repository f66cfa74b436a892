"""FastAPI, served by uvicorn: a lock per request, released when the function returns, and what its troubles look like."""

# Annotations are evaluated here: FastAPI would look for the names of local functions in the module.

import asyncio
import contextlib
import re
import secrets
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

import aiohttp
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Depends,
    FastAPI,
    Header,
    HTTPException,
    Path,
    Query,
    Request,
    WebSocket,
)
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

import aiolock
from aiolock import Lease
from aiolock.backends.memory import MemoryBackend
from aiolock.fastapi import LockClient, client, exception_handlers, lifespan, locked
from tests.faults import staging
from tests.faults.proxy import Proxy
from tests.faults.staging import nothing_remains
from tests.integrations.web_servers import PATIENCE, asgi, closed_port, hang_up, until

Order = Annotated[Lease, locked("order:{order_id}", timeout=0, retry_after=7)]
Patient = Annotated[Lease, locked("order:{order_id}", timeout=PATIENCE)]


class Desk:
    """What the functions of an application and its test tell each other."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.seen: list[object] = []

    async def work(self) -> str:
        """Work until the test says that it is enough."""
        self.entered.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise
        return "done"


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def app(deployment) -> FastAPI:
    return FastAPI(lifespan=lifespan(deployment.url, namespace=deployment.namespace, ttl=5))


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


async def free(rival: aiolock.Client, name: str) -> bool:
    lease = await rival.lock(name).try_acquire()
    if lease is not None:
        await lease.release()
    return lease is not None


# --- holding


async def test_the_lock_is_held_while_the_function_runs_and_free_before_anything_after_it(
    app, rival, http, desk
):
    async def afterwards() -> None:
        desk.seen.append(await free(rival, "order:7"))

    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order, tasks: BackgroundTasks) -> int:
        desk.seen.append(await free(rival, "order:7"))
        tasks.add_task(afterwards)
        return lease.token

    @app.post("/streams/{order_id}")
    async def stream(order_id: int, lease: Order) -> StreamingResponse:
        async def body():
            yield str(await free(rival, "order:7"))

        return StreamingResponse(body())

    async with asgi(app) as address:
        async with http.post(f"{address}/orders/7") as response:
            assert response.status == 200
            assert await response.json() > 0
        await until(lambda: len(desk.seen) == 2, "the background task ran")
        async with http.post(f"{address}/streams/7") as response:
            assert await response.text() == "True"
    assert desk.seen == [False, True]


async def test_requests_for_one_order_take_turns_and_others_do_not_wait(app, rival, http):
    inside: dict[int, int] = {}
    most: dict[int, int] = {}
    everybody = asyncio.Event()

    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Patient) -> None:
        inside[order_id] = inside.get(order_id, 0) + 1
        most[order_id] = max(most.get(order_id, 0), inside[order_id])
        if len(inside) == 3:
            everybody.set()
        await everybody.wait()
        inside[order_id] -= 1

    async with asgi(app) as address, asyncio.TaskGroup() as group:

        async def post(number: int) -> None:
            async with http.post(f"{address}/orders/{number}") as response:
                assert response.status == 200

        for number in [1, 2, 3] * 4:
            group.create_task(post(number))
    assert most == {1: 1, 2: 1, 3: 1}


async def test_a_route_may_be_locked_without_a_parameter(app, rival, http):
    @app.post("/rebuild", dependencies=[locked("rebuild", timeout=0)])
    async def rebuild() -> bool:
        return await free(rival, "rebuild")

    async with asgi(app) as address, http.post(f"{address}/rebuild") as response:
        assert await response.json() is False
    assert await free(rival, "rebuild")


async def test_what_the_function_raises_goes_on_as_it_is_and_the_lock_is_free(app, rival, http):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> None:
        raise HTTPException(402, "no money")

    async with asgi(app) as address:
        for _ in range(2):
            async with http.post(f"{address}/orders/7") as response:
                assert response.status == 402
                assert await response.json() == {"detail": "no money"}
        await nothing_remains(rival, "order:7")


async def test_another_kind_of_lock_by_a_function(app, rival, http):
    def twice(client: aiolock.Client, name: str) -> aiolock.Lock:
        return client.reentrant_lock(name, timeout=0)

    @app.post("/orders/{order_id}")
    async def pay(
        order_id: int, lease: Annotated[Lease, locked("order:{order_id}", lock=twice)], locks: LockClient
    ):
        async with locks.reentrant_lock("order:7") as inner:
            return inner.token == lease.token

    async with asgi(app) as address:
        async with http.post(f"{address}/orders/7") as response:
            assert await response.json() is True
        async with rival.lock("order:7"), http.post(f"{address}/orders/7") as response:
            assert response.status == 409


async def test_readers_are_in_together_and_a_writer_is_not(app, rival, http):
    def read(client: aiolock.Client, name: str) -> aiolock.ReadLock:
        return client.rwlock(name).read(timeout=0)

    @app.get("/reports/{report}")
    async def look(report: str, lease: Annotated[Lease, locked("report:{report}", lock=read)]) -> str:
        return str(lease.kind)

    async with asgi(app) as address:
        async with rival.rwlock("report:x").read(), http.get(f"{address}/reports/x") as response:
            assert await response.json() == "read"
        async with rival.rwlock("report:x").write(), http.get(f"{address}/reports/x") as response:
            assert response.status == 409


# --- not acquired, lost, unreachable


async def test_a_lock_that_is_taken_is_a_conflict_with_a_hint_when_to_try_again(app, rival, http):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> None:
        raise AssertionError("nobody gets here")

    async with asgi(app) as address, rival.lock("order:7"), http.post(f"{address}/orders/7") as response:
        assert response.status == 409
        assert response.headers["Retry-After"] == "7"
        assert "order:7" not in await response.text()


async def test_a_loss_that_only_the_release_finds_is_answered_503(app, deployment, http):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> str:
        await deployment.forget(lease)
        return "done"

    async with asgi(app) as address, http.post(f"{address}/orders/7") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "7"


async def test_a_loss_cancels_the_function_and_is_answered_503(app, rival, http, desk):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> str:
        return await desk.work()

    async with asgi(app) as address:
        answer = asyncio.create_task(http.post(f"{address}/orders/7"))
        await desk.entered.wait()
        assert await rival.lock("order:7").force_release()
        response = await answer
        assert response.status == 503
        assert response.headers["Retry-After"] == "7"
        response.close()
        assert desk.seen == ["cancelled"]
        desk.go_on.set()
        async with http.post(f"{address}/orders/7") as response:
            assert response.status == 200


class OnStack:
    """A lock of an application, entered on an exit stack."""

    def __init__(self, client: aiolock.Client, name: str) -> None:
        self._lock = client.lock(name)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Lease:
        return await self._stack.enter_async_context(self._lock)

    async def __aexit__(self, *error) -> None:
        await self._stack.__aexit__(*error)


async def test_a_loss_cancels_the_function_also_under_a_lock_that_is_entered_on_an_exit_stack(
    app, rival, http, desk
):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Annotated[Lease, locked("order:{order_id}", lock=OnStack)]) -> str:
        return await desk.work()

    async with asgi(app) as address:
        answer = asyncio.create_task(http.post(f"{address}/orders/7"))
        await desk.entered.wait()
        assert await rival.lock("order:7").force_release()
        async with await answer as response:
            assert response.status == 503
        assert desk.seen == ["cancelled"]


async def test_under_a_middleware_that_runs_the_function_in_a_task_of_its_own_it_is_the_same(
    app, rival, http, desk
):
    @app.middleware("http")
    async def passes_on(request: Request, call_next):
        return await call_next(request)

    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> str:
        return await desk.work()

    async with asgi(app) as address:
        answer = asyncio.create_task(http.post(f"{address}/orders/7"))
        await desk.entered.wait()
        await rival.lock("order:7").force_release()
        async with await answer as response:
            assert response.status == 503
        assert desk.seen == ["cancelled"]
        desk.entered.clear()
        async with hang_up(address, "/orders/7"):
            await desk.entered.wait()
        desk.go_on.set()
        await nothing_remains(rival, "order:7")


async def test_a_loss_in_a_task_group_of_the_function_ends_the_group(app, rival, http, desk):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(desk.work())
            group.create_task(desk.work())

    async with asgi(app) as address:
        answer = asyncio.create_task(http.post(f"{address}/orders/7"))
        await desk.entered.wait()
        await rival.lock("order:7").force_release()
        async with await answer as response:
            assert response.status == 503
    assert desk.seen == ["cancelled", "cancelled"]


async def test_a_loss_that_is_only_signalled_is_answered_503_when_the_function_has_ended(
    app, rival, http, desk
):
    @app.post("/orders/{order_id}")
    async def pay(
        order_id: int, lease: Annotated[Lease, locked("order:{order_id}", on_loss="signal")]
    ) -> None:
        desk.entered.set()
        desk.seen.append(await lease.wait_lost())

    async with asgi(app) as address:
        answer = asyncio.create_task(http.post(f"{address}/orders/7"))
        await desk.entered.wait()
        await rival.lock("order:7").force_release()
        async with await answer as response:
            assert response.status == 503
    assert desk.seen == ["force-released"]


async def test_a_function_in_a_thread_is_not_interrupted_but_told(app, rival, http, desk):
    loop = asyncio.get_running_loop()

    @app.post("/orders/{order_id}")
    def pay(order_id: int, lease: Order) -> None:
        lease.check()
        released = asyncio.run_coroutine_threadsafe(rival.lock("order:7").force_release(), loop)
        assert released.result(PATIENCE)
        asyncio.run_coroutine_threadsafe(lease.wait_lost(), loop).result(PATIENCE)
        with pytest.raises(aiolock.LockLost):
            lease.check()
        desk.seen.append("went on")

    async with asgi(app) as address, http.post(f"{address}/orders/7") as response:
        assert response.status == 503
    assert desk.seen == ["went on"]


async def test_a_server_that_cannot_be_reached_is_answered_503(http):
    async def travel(step):
        if broken.is_set():
            raise aiolock.BackendUnavailable("the connection is cut")
        return step()

    broken = asyncio.Event()
    app = FastAPI(lifespan=lifespan(lambda: aiolock.Client(MemoryBackend("memory://cut", transport=travel))))

    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> None: ...

    async with asgi(app) as address:
        async with http.post(f"{address}/orders/7") as response:
            assert response.status == 200
        broken.set()
        async with http.post(f"{address}/orders/7") as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "7"
        broken.clear()


@pytest.mark.parametrize("refused", [True, False])
async def test_a_server_that_goes_away_later_is_answered_503(redis_url, http, refused):
    """However short the timeout of a request is, and also if another request of this process asks already."""
    async with Proxy("127.0.0.1", urlsplit(redis_url).port) as proxy:
        opened = aiolock.connect(f"redis://127.0.0.1:{proxy.port}/0", command_timeout=2)
        app = FastAPI(lifespan=lifespan(lambda: opened))

        @app.post("/orders/{order_id}")
        async def pay(
            order_id: int, lease: Annotated[Lease, locked("order:{order_id}", timeout=0.5)]
        ) -> None: ...

        async with asgi(app) as address:

            async def status() -> int:
                async with http.post(f"{address}/orders/7") as response:
                    return response.status

            assert await status() == 200
            proxy.refuse = refused
            if refused:
                proxy.reset_all()
            else:
                proxy.blackhole()
            await staging.until(opened._runtime.outages.describe)
            assert await asyncio.gather(*(status() for _ in range(3))) == [503] * 3
            proxy.refuse = False
            proxy.reset_all()
            proxy.heal(release=False)


async def test_locks_that_a_function_takes_by_itself_have_answers_as_well(deployment, rival, http):
    app = FastAPI(
        lifespan=lifespan(deployment.url, namespace=deployment.namespace),
        exception_handlers=exception_handlers,
    )

    @app.post("/orders/{order_id}")
    async def pay(order_id: int, locks: LockClient) -> None:
        async with locks.lock(f"order:{order_id}", timeout=0):
            await rival.lock(f"order:{order_id}").force_release()
            await asyncio.sleep(PATIENCE)

    async with asgi(app) as address:
        async with http.post(f"{address}/orders/7") as response:
            assert response.status == 503
        async with rival.lock("order:8"), http.post(f"{address}/orders/8") as response:
            assert response.status == 409
            assert response.headers["Retry-After"] == "1"
            assert set(await response.json()) == {"detail"}


# --- going away


async def test_a_client_that_goes_away_while_the_function_works_leaves_no_lock_behind(app, rival, desk):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> str:
        return await desk.work()

    async with asgi(app) as address:
        async with hang_up(address, "/orders/7"):
            await desk.entered.wait()
        desk.go_on.set()
        await nothing_remains(rival, "order:7")
    assert desk.seen == []


async def test_a_client_that_goes_away_while_it_waits_leaves_neither_lock_nor_place_behind(app, rival, desk):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Patient) -> None:
        desk.seen.append(order_id)

    async def somebody_waits() -> bool:
        return len((await rival.lock("order:7").inspect()).waiters) == 1

    async with asgi(app) as address:
        async with rival.lock("order:7"), hang_up(address, "/orders/7"):
            await until(somebody_waits, "the request waits")
        await nothing_remains(rival, "order:7")


async def test_a_server_that_shuts_down_gives_its_locks_back(app, rival, desk):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> str:
        return await desk.work()

    with contextlib.suppress(asyncio.CancelledError):
        async with asgi(app, timeout_graceful_shutdown=0) as address, hang_up(address, "/orders/7"):
            await desk.entered.wait()
    await nothing_remains(rival, "order:7")


# --- names


class Size(StrEnum):
    SMALL = "small"


async def test_a_name_is_made_of_the_values_that_the_function_gets(app, rival, http):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> str:
        return lease.name

    @app.post("/items/{item_id}")
    async def item(
        item: Annotated[int, Path(alias="item_id", ge=1)],
        lease: Annotated[Lease, locked("{item_id}:{size}:{page}:{text}")],
        size: Size,
        page: Annotated[int, Query()] = 1,
        text: str = Query("none"),
    ) -> str:
        return lease.name

    async with asgi(app) as address:
        for path, name in [
            ("/orders/7", "order:7"),
            ("/orders/07", "order:7"),
            ("/items/01?size=small", "1:small:1:none"),
            ("/items/1?size=small&page=02&text=%F0%9F%94%92", "1:small:2:🔒"),
        ]:
            async with http.post(address + path) as response:
                assert (response.status, await response.json()) == (200, name)
        for path, place in [
            ("/orders/seven", ["path", "order_id"]),
            ("/items/0?size=small", ["path", "item_id"]),
            ("/items/1", ["query", "size"]),
            ("/items/1?size=big", ["query", "size"]),
        ]:
            async with http.post(address + path) as response:
                assert response.status == 422
                assert (await response.json())["detail"][0]["loc"] == place


async def test_a_name_that_cannot_be_is_the_callers_mistake(app, http):
    @app.post("/{text}")
    async def pay(lease: Annotated[Lease, locked("{text}")]) -> None: ...

    async with asgi(app) as address, http.post(f"{address}/{'x' * 1025}") as response:
        assert response.status == 422


async def test_a_name_may_come_from_a_dependency_of_ones_own(app, http):
    async def user(request: Request) -> str:
        return request.headers["x-user"]

    def cart(user: Annotated[str, Depends(user)], shop: int) -> str:
        return f"cart:{shop}:{user}"

    @app.post("/{shop}/cart")
    async def fill(lease: Annotated[Lease, locked(cart)]) -> str:
        return lease.name

    async with asgi(app) as address, http.post(f"{address}/03/cart", headers={"x-user": "eve"}) as response:
        assert await response.json() == "cart:3:eve"


@pytest.fixture
def bare(rival) -> FastAPI:
    """An application that gets its client without our lifespan."""
    made = FastAPI()
    made.dependency_overrides[client] = lambda: rival
    return made


async def test_a_generator_is_refused_because_it_would_run_without_the_lock(app, bare, http, caplog):
    async def stream(order_id: int, lease: Order):
        yield b"too late"

    app.get("/orders/{order_id}")(stream)
    with pytest.raises(aiolock.ConfigError, match="is a generator"):
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")
    bare.get("/orders/{order_id}")(stream)
    async with asgi(bare) as address, http.get(f"{address}/orders/7") as response:
        assert response.status == 500
    assert "is a generator" in caplog.text


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("", {}, "name"),
        (7, {}, "name"),
        ("order:{}", {}, "braces"),
        ("order:{0}", {}, "braces"),
        ("order:{order.id}", {}, "braces"),
        ("order:{order_id!r}", {}, "braces"),
        ("order:{order_id:>8}", {}, "braces"),
        ("order:{order_id", {}, "template"),
        ("order", {"timeout": -1}, "timeout"),
        ("order", {"ttl": 0.01}, "ttl"),
        ("order", {"on_loss": "ignore"}, "on_loss"),
        ("order", {"fair": 1}, "fair"),
        ("order", {"max_hold": 0}, "max_hold"),
        ("order", {"renew": 0}, "renew"),
        ("order", {"ttl": 3, "grace": 2}, "grace"),
        ("order", {"retry_after": "soon"}, "retry_after"),
        ("order", {"lock": "rw"}, "lock"),
        ("order", {"label": ""}, "label"),
        ("order", {"tll": 3}, "tll.*ttl"),
        ("order", {"lock": print, "ttl": 3}, "ttl"),
    ],
)
def test_what_cannot_work_is_said_when_the_application_is_built(name, options, word):
    with pytest.raises(aiolock.ConfigError, match=word):
        locked(name, **options)


class Page(BaseModel):
    number: int = Field(1, validation_alias="page")
    size: int = 10


async def order_of(order_id: int) -> int:
    return order_id


async def text_of(order_id: str) -> str:
    return order_id


async def test_a_name_may_be_made_of_what_a_dependency_declares(app, http):
    """7 and 07 are one order wherever it says int: beside the function, in the route, around the router, in between."""

    async def in_between(order: Annotated[int, Depends(order_of)]) -> int:
        return order

    async def by_alias(order: Annotated[int, Path(alias="order_id")]) -> int:
        return order

    below, router = APIRouter(), APIRouter(prefix="/routed/{order_id}", dependencies=[Depends(order_of)])

    @app.post("/beside/{order_id}")
    async def beside(order: Annotated[int, Depends(order_of)], lease: Order) -> str:
        return lease.name

    @app.post("/between/{order_id}")
    async def between(order: Annotated[int, Depends(in_between)], lease: Order) -> str:
        return lease.name

    @app.post("/aliased/{order_id}")
    async def aliased(order: Annotated[int, Depends(by_alias)], lease: Order) -> str:
        return lease.name

    @app.post("/route/{order_id}", dependencies=[Depends(order_of)])
    async def route(lease: Order) -> str:
        return lease.name

    @router.post("/router")
    async def routed(lease: Order) -> str:
        return lease.name

    @below.post("/included")
    async def included(lease: Order) -> str:
        return lease.name

    @below.post("/nobody")
    async def own(order_id: str, lease: Order) -> str:
        return lease.name

    app.include_router(router)
    app.include_router(below, prefix="/below/{order_id}", dependencies=[Depends(order_of)])
    async with asgi(app) as address:
        for path in (
            "beside/{}",
            "between/{}",
            "aliased/{}",
            "route/{}",
            "routed/{}/router",
            "below/{}/included",
        ):
            for text in ("7", "07"):
                async with http.post(f"{address}/{path.format(text)}") as response:
                    assert (path, response.status, await response.json()) == (path, 200, "order:7")
            async with http.post(f"{address}/{path.format('seven')}") as response:
                assert response.status == 422
        # What the function itself gets counts.
        async with http.post(f"{address}/below/07/nobody") as response:
            assert await response.json() == "order:07"


async def test_a_name_in_braces_is_found_as_the_url_or_the_function_calls_it(app, http):
    @app.post("/aliases")
    async def aliases(
        order: Annotated[int, Query(validation_alias="oid")],
        other: Annotated[int, Query(alias="no")],
        lease: Annotated[Lease, locked("{oid}:{order}:{no}:{other}")],
    ) -> str:
        assert (order, other) == (7, 8)
        return lease.name

    @app.post("/pages")
    async def pages(page: Annotated[Page, Query()], lease: Annotated[Lease, locked("{page}:{size}")]) -> str:
        assert lease.name == f"{page.number}:{page.size}"
        return lease.name

    async with asgi(app) as address:
        for path, name in [
            ("/aliases?oid=07&no=08", "7:7:8:8"),
            ("/pages?page=02", "2:10"),
            ("/pages?size=05", "1:5"),
        ]:
            async with http.post(address + path) as response:
                assert (path, response.status, await response.json()) == (path, 200, name)
        for path, place in [("/aliases?no=8", ["query", "oid"]), ("/pages?page=x", ["query", "page"])]:
            async with http.post(address + path) as response:
                assert response.status == 422
                assert (await response.json())["detail"][0]["loc"] == place


async def test_a_part_of_the_path_that_nobody_declares_is_a_text(app, http):
    below = FastAPI()

    @below.post("/{order_id}")
    async def pay(lease: Annotated[Lease, locked("{shop}:{order_id}")]) -> str:
        return lease.name

    app.mount("/{shop}", below)
    async with asgi(app) as address, http.post(f"{address}/03/07") as response:
        assert await response.json() == "03:07"


async def unknown(order_id: int, lease: Annotated[Lease, locked("{order}:{order_id}")]) -> None: ...
async def undeclared(lease: Annotated[Lease, locked("{page}")]) -> None: ...
async def several(ids: Annotated[list[int], Query()], lease: Annotated[Lease, locked("{ids}")]) -> None: ...
async def perhaps_several(
    lease: Annotated[Lease, locked("{ids}")], ids: Annotated[set[int] | None, Query()] = None
) -> None: ...
async def group(
    page: Annotated[Page, Query()], lease: Annotated[Lease, locked("{number}{page_}")]
) -> None: ...
async def header(x_user: Annotated[str, Header()], lease: Annotated[Lease, locked("{x_user}")]) -> None: ...
async def body(order: Annotated[int, Body()], lease: Annotated[Lease, locked("{order}")]) -> None: ...
async def differing(
    a: Annotated[int, Depends(order_of)],
    b: Annotated[str, Depends(text_of)],
    lease: Annotated[Lease, locked("{order_id}")],
) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (unknown, "unknown.*there is no order to make a name of; there is order_id;"),
        (undeclared, "undeclared.*there is no page to make a name of; there is order_id;"),
        (several, r"several.*ids is more than one value \(list\[int\]\)"),
        (perhaps_several, "perhaps_several.*ids is more than one value"),
        (group, "group.*there is no page_ to make"),
        (header, "header.*x_user is in the header;.*locked\\(function\\)"),
        (body, "body.*order is in the body"),
        (differing, "order_of and text_of declare order_id differently; declare it in differing as well"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_template_that_cannot_become_a_name_is_said_when_the_application_starts(
    app, bare, http, caplog, function, words
):
    outer, router = FastAPI(lifespan=lifespan("memory://")), APIRouter()
    for place in (app, bare, router):
        place.post("/orders/{order_id}")(function)
    outer.mount("/v2", bare)
    included = FastAPI(lifespan=lifespan("memory://"))
    included.include_router(router, prefix="/v3")
    for each in (app, outer, included):
        with pytest.raises(aiolock.ConfigError, match=words):
            async with each.router.lifespan_context(each):
                raise AssertionError("it started")
    # Without our lifespan, the first request is the first moment.
    async with asgi(bare) as address:
        path = "/orders/7?ids=1&page_=1&page=1"
        async with http.post(address + path, headers={"x-user": "eve"}, json=1) as response:
            assert response.status == 500
    assert re.search(words, caplog.text)


# --- the life of an application


async def test_the_lifespan_goes_around_the_applications_own(deployment, http, desk):
    @contextlib.asynccontextmanager
    async def mine(app):
        async with app.state.aiolock.lock("migration"):
            desk.seen.append("up")
        yield {"greeting": "hello"}
        async with app.state.aiolock.lock("migration"):
            desk.seen.append("down")

    app = FastAPI(lifespan=lifespan(deployment.url, mine, namespace=deployment.namespace))

    @app.get("/")
    async def look(request: Request, locks: LockClient) -> str:
        async with locks.lock("migration"):
            return request.state.greeting

    for _ in range(2):
        async with asgi(app) as address, http.get(address) as response:
            assert await response.json() == "hello"
        assert not hasattr(app.state, "aiolock")
    assert desk.seen == ["up", "down"] * 2


async def test_a_lazy_client_starts_without_its_server_and_works_when_that_is_there(redis_url, http):
    place = urlsplit(redis_url)
    async with Proxy(place.hostname, place.port) as way:
        way.stop_listening()
        url, namespace = f"redis://{way.host}:{way.port}/0", f"web-{secrets.token_hex(4)}"
        app = FastAPI(lifespan=lifespan(url, namespace=namespace, lazy=True, command_timeout=0.5))

        @app.post("/orders/{order_id}")
        async def pay(order_id: int, lease: Order) -> int:
            return lease.token

        @app.get("/")
        async def look(locks: LockClient) -> bool:
            return await locks.lock("order:7").locked()

        async with asgi(app) as address:
            async with http.post(f"{address}/orders/7") as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "7"
            await way.start_listening()

            async def paid() -> bool:
                async with http.post(f"{address}/orders/7") as response:
                    assert response.status in (200, 503)
                    return response.status == 200 and await response.json() > 0

            await staging.until(paid, "the lock of a server that has come back")
            async with http.get(address) as response:
                assert await response.json() is False


async def test_an_application_whose_client_waits_for_its_server_does_not_start_without_it():
    with closed_port() as port:
        app = FastAPI(
            lifespan=lifespan(f"redis://127.0.0.1:{port}/0", wait_for_server=0.3, command_timeout=0.2)
        )
        with pytest.raises(aiolock.BackendUnavailable):
            async with app.router.lifespan_context(app):
                pass


async def test_mounted_applications_share_the_client(app, rival, http):
    below = FastAPI()

    @below.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> bool:
        return await free(rival, "order:7")

    app.mount("/v2", below)
    async with asgi(app) as address, http.post(f"{address}/v2/orders/7") as response:
        assert await response.json() is False


async def test_tests_may_put_another_client_in_its_place(app, rival, http):
    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> None: ...

    async with aiolock.connect("memory://another") as other:
        app.dependency_overrides[client] = lambda: other
        async with asgi(app) as address, rival.lock("order:7"):
            async with http.post(f"{address}/orders/7") as response:
                assert response.status == 200
            async with other.lock("order:7"), http.post(f"{address}/orders/7") as response:
                assert response.status == 409


async def test_an_application_without_a_client_says_how_to_get_one(http, caplog):
    app = FastAPI()

    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Order) -> None: ...

    async with asgi(app) as address, http.post(f"{address}/orders/7") as response:
        assert response.status == 500
    assert "lifespan=lifespan(url)" in caplog.text


@pytest.mark.parametrize(
    ("source", "options", "word"),
    [
        (7, {}, "URL"),
        ("nowhere://", {}, "memory://"),
        ("memory://", {"tll": 3}, "tll"),
        (lambda: 7, {"ttl": 3}, "ttl"),
    ],
)
def test_a_source_that_cannot_work_is_said_when_the_application_is_built(source, options, word):
    with pytest.raises(aiolock.ConfigError, match=word):
        lifespan(source, **options)


async def test_a_function_that_makes_no_client_keeps_the_application_from_starting():
    app = FastAPI()
    with pytest.raises(aiolock.ConfigError, match="returned 7"):
        async with lifespan(lambda: 7)(app):
            raise AssertionError("it started")


# --- WebSockets


class Caller:
    """The other end of a WebSocket, as ASGI has it; no library of WebSockets is needed."""

    def __init__(self, app: FastAPI, path: str) -> None:
        self.told: asyncio.Queue[dict] = asyncio.Queue()
        self.sent: asyncio.Queue[dict] = asyncio.Queue()
        self.told.put_nowait({"type": "websocket.connect"})
        scope = {"type": "websocket", "path": path, "headers": [], "query_string": b"", "state": {}}
        self.running = asyncio.create_task(app(scope, self.told.get, self.sent.put))


async def test_a_websocket_is_closed_when_the_lock_is_taken_or_lost(app, rival):
    @app.websocket("/rooms/{room}")
    async def speak(
        websocket: WebSocket, room: str, lease: Annotated[Lease, locked("room:{room}", timeout=0)]
    ) -> None:
        await websocket.accept()
        await websocket.receive_text()

    async with rival.lock("room:2"):
        app.dependency_overrides[client] = lambda: rival
        first, second = Caller(app, "/rooms/1"), Caller(app, "/rooms/2")
        assert (await first.sent.get())["type"] == "websocket.accept"
        refused = await second.sent.get()
        assert (refused["type"], refused["code"]) == ("websocket.close", 1013)
        await rival.lock("room:1").force_release()
        closed = await first.sent.get()
        assert (closed["type"], closed["code"]) == ("websocket.close", 1013)
        await asyncio.gather(first.running, second.running)
    await nothing_remains(rival, "room:1")


@pytest.fixture
def talking(app, rival):
    """An application with the handlers of exceptions, whose WebSockets take the lock by themselves."""
    for kind, handler in exception_handlers.items():
        app.add_exception_handler(kind, handler)
    app.dependency_overrides[client] = lambda: rival

    @app.websocket("/accepted")
    async def accepted(websocket: WebSocket, locks: LockClient) -> None:
        await websocket.accept()
        async with locks.lock("room", timeout=0):
            await websocket.receive_text()

    @app.websocket("/early")
    async def early(websocket: WebSocket, locks: LockClient) -> None:
        async with locks.lock("room", timeout=0):
            await websocket.accept()

    @app.websocket("/ended/{by}")
    async def ended(websocket: WebSocket, by: str, locks: LockClient) -> None:
        await websocket.accept()
        if by == "function":
            await websocket.close()
        else:
            await websocket.receive()
        async with locks.lock("room", timeout=0):
            raise AssertionError("it was free")

    return app


@pytest.mark.parametrize(("path", "before"), [("/accepted", ["websocket.accept"]), ("/early", [])])
async def test_a_websocket_that_takes_the_lock_by_itself_is_closed_as_well(talking, rival, path, before):
    async with rival.lock("room"):
        caller = Caller(talking, path)
        for kind in before:
            assert (await caller.sent.get())["type"] == kind
        closed = await caller.sent.get()
        await caller.running
    assert (closed["type"], closed["code"]) == ("websocket.close", 1013)
    assert "room" not in closed["reason"]
    assert caller.sent.empty()


async def test_a_websocket_whose_own_lock_is_lost_is_closed_as_well(talking, rival):
    caller = Caller(talking, "/accepted")
    assert (await caller.sent.get())["type"] == "websocket.accept"
    await until(rival.lock("room").locked)
    await rival.lock("room").force_release()
    closed = await caller.sent.get()
    await caller.running
    assert (closed["type"], closed["code"]) == ("websocket.close", 1013)


@pytest.mark.parametrize("by", ["function", "caller"])
async def test_a_websocket_that_was_closed_is_not_closed_again(talking, rival, by):
    async with rival.lock("room"):
        caller = Caller(talking, f"/ended/{by}")
        assert (await caller.sent.get())["type"] == "websocket.accept"
        if by == "function":
            assert (await caller.sent.get())["code"] == 1000
        else:
            caller.told.put_nowait({"type": "websocket.disconnect", "code": 1001})
        await caller.running
    assert caller.sent.empty()
