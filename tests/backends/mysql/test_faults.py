"""What goes wrong with servers, sessions, processes and links, and what becomes of locks then."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from urllib.parse import quote

import aiomysql
import pytest
from pymysql import _auth
from pymysql.constants import CLIENT

import aiolock
from aiolock import AcquireTimeout, BackendRefused, BackendUnavailable, LockLost, UnsafeBackend
from aiolock.backends.mysql import MySQLBackend
from aiolock.backends.mysql.protocol import Driver
from tests import servers
from tests.backends.mysql.conftest import PASSWORD
from tests.backends.mysql.tools import as_root, sessions
from tests.certificates import Certificates
from tests.faults.proxy import Proxy, mysql_frames
from tests.faults.staging import PATIENCE, gets_the_lock, nothing_remains, queued, until, waiting

MODES = ("lease", "session", "row")
every_mode = pytest.mark.parametrize("mode", MODES)


def session_of(lease):
    claim = lease._hold.validity.claim
    return getattr(claim, "session", None) or claim._turn


async def one_blocked(deployment) -> tuple[int, str]:
    """The session of the one waiter and its statement, once it waits."""
    found: list = []

    async def waits() -> bool:
        found[:] = await blocked(deployment)
        return bool(found)

    await until(waits)
    [[number, _, statement]] = found
    return number, statement


async def blocked(deployment) -> list:
    """The sessions that wait: any statement passes through these states, so only one that is found at it twice."""

    async def found() -> list:
        rows = await sessions(deployment.server)
        return [row for row in rows if row[2] and row[1].lower() in ("user lock", "statistics")]

    before = await found()
    return [row for row in await found() if row in before]


# --- sessions that end


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_a_killed_session_is_a_lost_lock_at_once(deployment, mode):
    async with deployment.connect(mode, ttl=60) as client:
        lease = await client.lock("x").acquire()
        await as_root(deployment.server, f"KILL {session_of(lease).id}")
        async with asyncio.timeout(PATIENCE):
            assert await lease.wait_lost() == "session"
        await gets_the_lock(client, "x")


async def test_a_lease_survives_its_session(deployment):
    async with deployment.connect(ttl=60) as client, deployment.connect() as rival:
        lease = await client.lock("x").acquire()
        waiter = asyncio.create_task(rival.lock("x").acquire())
        await queued(client.lock("x"), 1)
        before = client.stats()["renewals"]
        await as_root(deployment.server, f"KILL {session_of(lease).id}")
        await until(lambda: client.stats()["renewals"] > before)
        lease.check()
        assert not waiter.done()
        # Its turnstile is with the waiter now, who looks at the row.
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            successor = await waiter
        assert successor.token > lease.token
        await successor.release()
        await nothing_remains(client, "x")


@every_mode
async def test_a_waiter_whose_statement_is_killed_goes_on_waiting(deployment, mode):
    async with deployment.connect(mode) as client, deployment.connect(mode) as rival:
        lease = await client.lock("x").acquire()
        waiter = asyncio.create_task(rival.lock("x").acquire())
        for _ in range(3):
            await as_root(deployment.server, f"KILL QUERY {(await one_blocked(deployment))[0]}")
        await until(lambda: blocked(deployment))
        assert not waiter.done()
        await lease.release()
        await (await waiter).release()


@every_mode
async def test_a_waiter_whose_session_is_killed_lines_up_again(deployment, mode):
    async with deployment.connect(mode) as client, deployment.connect(mode) as rival:
        lease = await client.lock("x").acquire()
        waiter = asyncio.create_task(rival.lock("x").acquire())
        await as_root(deployment.server, f"KILL {(await one_blocked(deployment))[0]}")
        await until(lambda: blocked(deployment))
        await lease.release()
        await (await waiter).release()


@every_mode
async def test_a_cancelled_waiter_ends_its_statement_and_its_session_is_used_again(deployment, mode):
    async with deployment.connect(mode) as client, deployment.connect(mode) as rival:
        lease = await client.lock("x").acquire()
        numbers = set()
        for _ in range(20):
            waiter = asyncio.create_task(rival.lock("x").acquire())
            number, _ = await one_blocked(deployment)
            numbers.add(number)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter

            async def nobody() -> bool:
                return not await blocked(deployment)

            await until(nobody)
        # In the row mode a try needs a session as well, and either may come first.
        assert len(numbers) <= 2
        await lease.release()
        await gets_the_lock(rival, "x")


async def test_a_cancellation_that_races_a_grant_leaves_no_ghost(deployment):
    for mode in MODES:
        async with deployment.connect(mode) as client, deployment.connect(mode) as rival:
            for number in range(40):
                lease = await client.lock("x").acquire(timeout=PATIENCE)
                waiter = asyncio.create_task(rival.lock("x").acquire())
                await until(lambda: blocked(deployment))
                if number % 2:
                    await asyncio.gather(lease.release(), asyncio.sleep(number * 0.00005))
                    waiter.cancel()
                else:
                    waiter.cancel()
                    await lease.release()
                with contextlib.suppress(asyncio.CancelledError):
                    await (await waiter).release()
            await gets_the_lock(client, "x")


@every_mode
async def test_locks_taken_in_opposite_orders_end_by_their_timeouts_and_leave_nothing(deployment, mode):
    """Waiting happens on other sessions than holding, so the server sees no cycle; `lock_all` has none to begin with."""
    async with deployment.connect(mode) as one, deployment.connect(mode) as other:
        met = asyncio.Barrier(2)

        async def both(client, first: str, second: str) -> None:
            async with client.lock(first):
                await met.wait()
                async with client.lock(second, timeout=0.5):
                    raise AssertionError("both have both")

        results = await asyncio.gather(both(one, "a", "b"), both(other, "b", "a"), return_exceptions=True)
        assert AcquireTimeout in {type(result) for result in results}
        for name in "ab":
            await gets_the_lock(one, name)
            await nothing_remains(other, name)


@pytest.mark.parametrize("mode", ["lease", "session"])
async def test_a_cycle_of_user_locks_that_the_server_breaks_costs_nothing(deployment, mode):
    """Somebody waits, with a turnstile or lock in hand, for one that our waiter has: the server ends one of the waits."""
    async with deployment.connect(mode) as client, deployment.connect(mode) as rival:
        # A lock that was won by waiting lives in a session that may wait again.
        lease = await rival.lock("x").acquire()
        waiter = asyncio.create_task(client.lock("x").acquire())
        _, statement = await one_blocked(deployment)
        name = statement.split("'")[1]
        admin = await aiomysql.connect(**{**deployment.server.admin, "db": "test"})
        try:
            async with admin.cursor() as cursor:
                await cursor.execute("SELECT GET_LOCK('mine', 0)")
                # Its cycle: we wait for x, whose holder waits for what we have.
                session = session_of(lease)
                cycle = asyncio.create_task(session.run("SELECT GET_LOCK('mine', 5)"))
                await asyncio.sleep(0.1)
                with pytest.raises(aiomysql.OperationalError, match=r"1213|3058"):
                    await cursor.execute(f"SELECT GET_LOCK('{name}', 5)")
        finally:
            admin.close()
        await cycle
        assert not waiter.done()
        lease.check()
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()
        await nothing_remains(client, "x")


async def test_a_session_that_lets_go_of_all_user_locks_costs_a_lease_nothing(deployment):
    async with deployment.connect() as client, deployment.connect() as rival:
        lease = await client.lock("x").acquire()
        await session_of(lease).run("DO RELEASE_ALL_LOCKS()")
        assert await rival.lock("x").try_acquire() is None
        waiter = asyncio.create_task(rival.lock("x").acquire())
        await lease.renew()
        lease.check()
        assert not waiter.done()
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()


async def test_a_session_that_lets_go_of_all_user_locks_is_noticed_by_the_next_renewal(deployment):
    async with deployment.connect("session") as client, deployment.connect("session") as rival:
        leases = [await client.lock(f"x{number}").acquire() for number in range(3)]
        await session_of(leases[0]).run("DO RELEASE_ALL_LOCKS()")
        kept = await client.lock("y").acquire()
        async with asyncio.timeout(PATIENCE):
            assert {await lease.wait_lost() for lease in leases} == {"revoked"}
        kept.check()
        await gets_the_lock(rival, "x0")
        await kept.release()


@every_mode
async def test_a_cancelled_waiter_ends_its_wait_at_the_server_in_milliseconds(deployment, mode):
    async with deployment.connect(mode) as client, deployment.connect(mode) as rival:
        lease = await client.lock("x").acquire()
        clock = asyncio.get_running_loop().time
        times = []
        for _ in range(20):
            waiter = asyncio.create_task(rival.lock("x").acquire())
            await until(lambda: blocked(deployment))
            begin = clock()
            waiter.cancel()

            async def nobody() -> bool:
                return not await blocked(deployment)

            await until(nobody)
            times.append(clock() - begin)
            await asyncio.wait([waiter])
        # Without KILL the server would notice after half a second or more; the fastest ones are not the machine's doing.
        assert sorted(times)[len(times) // 4] < 0.1
        await lease.release()


# --- processes that end


async def spawn(deployment, mode: str, name: str, ttl: float, own: float | None = None):
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "tests.backends.mysql.holder",
            deployment.url(),
            mode,
            deployment.namespace,
            name,
            str(ttl),
            str(own or ttl),
        ),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        assert await process.stdout.readline() == b"held\n"
    return process


@every_mode
async def test_a_stopped_holder_loses_the_lock_and_learns_it_on_waking(deployment, mode):
    ttl = 2.0
    async with deployment.connect(mode, ttl=ttl) as client:
        process = await spawn(deployment, mode, "x", ttl)
        clock = asyncio.get_running_loop().time
        try:
            process.send_signal(signal.SIGSTOP)
            begin = clock()
            lease = await client.lock("x").acquire(timeout=30)
            assert clock() - begin < ttl + 5
            process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(30):
                assert (await process.stdout.readline()).startswith(b"lost ")
            lease.check()
            await lease.release()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            process._transport.close()


@every_mode
async def test_a_killed_holder_is_succeeded(deployment, mode):
    ttl = 2.0
    async with deployment.connect(mode, ttl=ttl) as client:
        process = await spawn(deployment, mode, "x", ttl)
        waiter = asyncio.create_task(client.lock("x").acquire(timeout=30))
        await until(lambda: blocked(deployment))
        process.kill()
        await process.wait()
        process._transport.close()
        await (await waiter).release()


# --- servers that end


@pytest.mark.ends_server
@pytest.mark.slow
@every_mode
async def test_a_restart_with_many_who_hold_and_wait(mariadb, deployment, mode):
    options = {"connections": 60} if mode == "row" else {}
    async with (
        deployment.connect(mode, ttl=20, **options) as client,
        deployment.connect(mode, ttl=20, **options) as rival,
    ):
        held = [await client.lock(f"x{number}").acquire() for number in range(50)]
        waiters = [asyncio.create_task(rival.lock(f"x{number % 10}").acquire()) for number in range(50)]
        await waiting(rival, 50)
        await until(lambda: blocked(deployment))
        mariadb.kill()
        mariadb.start()
        if mode == "lease":
            await until(lambda: client.stats()["renewals"] >= 50)
            assert not any(lease.lost for lease in held)
        else:
            async with asyncio.timeout(PATIENCE):
                assert {await lease.wait_lost() for lease in held} == {"session"}
        for lease in held:
            await lease.release()
        tokens: dict[str, list[int]] = {}
        for waiter in asyncio.as_completed(waiters, timeout=60):
            lease = await waiter
            tokens.setdefault(lease.name, [held[int(lease.name[1:])].token]).append(lease.token)
            await lease.release()
        assert all(given == sorted(set(given)) for given in tokens.values())
        assert len(tokens) == 10


@pytest.mark.ends_server
async def test_a_server_that_stands_still_is_unavailable_in_time(mariadb, deployment):
    async with deployment.connect(ttl=30, command_timeout=0.5) as client:
        lease = await client.lock("y").acquire()
        mariadb.freeze()
        try:
            clock = asyncio.get_running_loop().time
            begin = clock()
            with pytest.raises(BackendUnavailable):
                await client.lock("x").acquire(timeout=0)
            with pytest.raises((BackendUnavailable, AcquireTimeout)):
                await client.lock("x").acquire(timeout=0.3)
            with pytest.raises(BackendUnavailable):
                await client.lock("x").inspect()
            assert clock() - begin < 5
        finally:
            mariadb.thaw()
        await lease.renew()
        lease.check()
        await gets_the_lock(client, "x")


async def test_a_server_that_takes_no_writes_is_refused(mariadb, deployment):
    await as_root(mariadb, "SET GLOBAL read_only = 1")
    try:
        for mode in MODES:
            with pytest.raises(BackendRefused, match="read_only"):
                await deployment.connect(mode).open()
    finally:
        await as_root(mariadb, "SET GLOBAL read_only = 0")


async def test_too_many_connections_is_unavailable_and_waiters_try_instead(mariadb, deployment):
    async with deployment.connect() as client, deployment.connect() as rival:
        lease = await client.lock("x").acquire()
        await as_root(mariadb, "SET GLOBAL max_connections = 10")
        crowd = []
        try:
            with pytest.raises(BackendUnavailable, match="1040"):
                while len(crowd) < 20:
                    crowd.append(await deployment.connect().open())
            waiter = asyncio.create_task(rival.lock("x").acquire())
            await waiting(rival, 1)
            await asyncio.sleep(0.3)
            assert not waiter.done()
            await lease.release()
            async with asyncio.timeout(PATIENCE):
                await (await waiter).release()
        finally:
            for other in crowd:
                await other.aclose()
            await as_root(mariadb, "SET GLOBAL max_connections = 151")


@pytest.mark.parametrize("how", ["acquire", "try"])
async def test_an_account_with_one_connection_hears_why_the_row_mode_cannot_lock(mariadb, deployment, how):
    """The other modes need no more than one."""
    await as_root(mariadb, "CREATE USER one@'%' WITH MAX_USER_CONNECTIONS 1")
    try:
        await as_root(mariadb, "GRANT ALL ON test.* TO one@'%'")
        for mode in MODES:
            url = f"mysql://one@{mariadb.host}:{mariadb.port}/test?mode={mode}"
            async with (
                deployment.connect(mode) as rival,
                aiolock.connect(url, namespace=deployment.namespace, ttl=5) as client,
            ):
                held = await rival.lock("x").acquire()
                if mode == "row":
                    with pytest.raises(BackendUnavailable, match=r"1226.*MAX_USER_CONNECTIONS"):
                        await client.lock("x").acquire(timeout=PATIENCE if how == "acquire" else 0)
                elif how == "acquire":
                    waiter = asyncio.create_task(client.lock("x").acquire(timeout=PATIENCE))
                    await asyncio.sleep(0.1)
                    await held.release()
                    await (await waiter).release()
                await held.release()
    finally:
        await as_root(mariadb, "DROP USER one@'%'")


def _lock(client):
    return client.lock("x")


def _semaphore(client):
    return client.semaphore("x", 1)


def _write(client):
    return client.rwlock("x").write()


@pytest.mark.parametrize("kind", [_lock, _semaphore, _write])
async def test_a_waiter_whose_table_is_dropped_hears_the_reason(mariadb, deployment, kind):
    async with (
        deployment.connect(table="absent", ttl=3) as holder,
        deployment.connect(table="absent", ttl=3) as client,
    ):
        try:
            lease = await kind(holder).acquire()
            waiter = asyncio.create_task(kind(client).acquire(timeout=PATIENCE))
            await until(lambda: has_waiter(kind(client)))
        finally:
            await as_root(mariadb, "DROP TABLE absent, absent_requests, absent_registers")
        with pytest.raises(BackendRefused, match="1146"):
            await waiter
        await lease.release()


async def has_waiter(lock) -> bool:
    return bool((await lock.inspect()).waiters)


async def test_who_waits_for_a_latch_whose_table_is_dropped_hears_the_reason(mariadb, deployment):
    async with deployment.connect(table="absent", ttl=3) as client:
        try:
            await client.latch("x", 2).count_down()
            waiter = asyncio.create_task(client.latch("x", 2).wait(timeout=PATIENCE))
            await asyncio.sleep(0.2)
        finally:
            await as_root(mariadb, "DROP TABLE absent, absent_requests, absent_registers")
        with pytest.raises(BackendRefused, match="1146"):
            await waiter


# --- being let in


@pytest.mark.parametrize("query", ["?tls=encrypt", "?tls=verify"])
async def test_tls_that_is_not_offered_is_an_error_before_the_password_is_sent(
    deployment, query, monkeypatch
):
    real = aiomysql.Connection._get_server_information

    async def greeted(driver) -> None:
        # Some servers have TLS without being asked.
        await real(driver)
        driver.server_capabilities &= ~CLIENT.SSL

    monkeypatch.setattr(aiomysql.Connection, "_get_server_information", greeted)
    seen: list[bytes] = []
    async with Proxy(
        deployment.server.host,
        deployment.server.port,
        framing=mysql_frames,
        on_frame=lambda way, frame: seen.append(frame) if way == "up" else None,
    ) as proxy:
        with pytest.raises(BackendRefused, match="does not offer TLS"):
            await aiolock.connect(deployment.url(proxy.port, query)).open()
    assert seen == []


async def test_tls_is_used_when_it_is_asked_for(tmp_path):
    ours = Certificates(tmp_path / "ours")
    others = Certificates(tmp_path / "others")
    extra = [f"--ssl-cert={ours.cert}", f"--ssl-key={ours.key}", f"--ssl-ca={ours.ca}"]
    with servers.MariaDB(extra=extra) as server:
        for query in (f"?tls=verify&tls_ca={ours.ca}", "?tls=encrypt"):
            backend = MySQLBackend(server.url + query)
            async with aiolock.Client(backend) as client:
                await gets_the_lock(client, "x")
                [answer] = await backend._context.ask("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
                assert answer.rows[0][1]
        for query in ("?tls=verify", f"?tls=verify&tls_ca={others.ca}"):
            with pytest.raises(BackendRefused, match=r"certificate.*tls_ca="):
                await aiolock.connect(server.url + query).open()


async def test_a_server_that_demands_tls_has_the_option_named(tmp_path):
    ours = Certificates(tmp_path)
    tls = [f"--ssl-cert={ours.cert}", f"--ssl-key={ours.key}", f"--ssl-ca={ours.ca}"]
    init = (
        f"CREATE USER onlytls@'127.0.0.1' IDENTIFIED BY '{PASSWORD}' REQUIRE SSL",
        "GRANT ALL ON test.* TO onlytls@'127.0.0.1'",
    )
    with servers.MariaDB(extra=tls) as server:
        for statement in init:
            await as_root(server, statement)
        login = f"mysql://onlytls:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}/test"
        with pytest.raises(BackendRefused, match=r"1045.*TLS alone, write tls=verify"):
            await aiolock.connect(login).open()
        async with aiolock.connect(f"{login}?ssl_mode=VERIFY_CA&ssl_ca={ours.ca}") as client:
            await gets_the_lock(client, "x")
        await as_root(server, "SET GLOBAL require_secure_transport=ON")
        with pytest.raises(BackendRefused, match="TLS alone, write tls=verify"):
            await aiolock.connect(server.url).open()


async def test_a_wrong_password_is_refused_and_not_shown(deployment):
    url = f"mysql://app:wrong-{PASSWORD[:6]}@{deployment.server.host}:{deployment.server.port}/test"
    with pytest.raises(BackendRefused, match="1045") as caught:
        await aiolock.connect(url).open()
    link = caught.value
    while link is not None:
        assert PASSWORD[:6] not in f"{link} {link!r}"
        link = link.__cause__ or link.__context__


async def test_a_password_of_any_letters_is_sent_as_the_server_keeps_it(deployment, mariadb):
    password = "pässword/пароль/合言葉"
    await as_root(mariadb, f"CREATE USER letters@'%' IDENTIFIED BY '{password}'")
    try:
        await as_root(mariadb, "GRANT ALL ON test.* TO letters@'%'")
        url = f"mysql://letters:{quote(password, safe='')}@{deployment.server.host}:{deployment.server.port}/test"
        async with aiolock.connect(url) as client:
            await gets_the_lock(client, "x")
    finally:
        await as_root(mariadb, "DROP USER letters@'%'")


async def test_a_password_that_needs_a_missing_package_is_refused_with_what_to_do(deployment, monkeypatch):
    async def asked_for_rsa(driver) -> None:
        _auth.sha2_rsa_encrypt(b"password", b"salt", b"key")

    monkeypatch.setattr(_auth, "_have_cryptography", False)
    monkeypatch.setattr(aiomysql.Connection, "_request_authentication", asked_for_rsa)
    with pytest.raises(BackendRefused, match="install cryptography"):
        await deployment.connect().open()


async def test_nobody_there_is_unavailable(deployment):
    async with Proxy(deployment.server.host, deployment.server.port) as proxy:
        proxy.stop_listening()
        with pytest.raises(BackendUnavailable, match="2003"):
            await deployment.connect(port=proxy.port).open()


async def test_a_proxy_that_numbers_sessions_itself_is_refused(deployment, monkeypatch):
    # The greeting carries the number of the session; whoever sits in between gives one of its own.
    monkeypatch.setattr(Driver, "thread_id", lambda self: 1 << 31)
    with pytest.raises(UnsafeBackend, match="proxy"):
        await deployment.connect().open()


# --- links


@every_mode
async def test_a_black_hole_ends_the_hold_in_time(deployment, mode):
    async with (
        Proxy(deployment.server.host, deployment.server.port, framing=mysql_frames) as proxy,
        deployment.connect(mode, ttl=60) as watcher,
    ):
        async with deployment.connect(mode, port=proxy.port, ttl=1.5) as client:
            lease = await client.lock("x").acquire()
            proxy.blackhole()
            with pytest.raises(LockLost) as caught:
                async with lease:
                    await asyncio.sleep(PATIENCE)
            assert caught.value.reason == "expired"
            proxy.heal()
        await gets_the_lock(watcher, "x")


async def test_an_answer_that_is_lost_is_found_again(deployment):
    async with (
        Proxy(deployment.server.host, deployment.server.port, framing=mysql_frames) as proxy,
        deployment.connect(port=proxy.port) as client,
        deployment.connect() as rival,
    ):
        for _ in range(5):
            cut = proxy.down.drop_next(1, reset=True)
            lease = await client.lock("x").acquire(timeout=PATIENCE)
            await cut.wait()
            lease.check()
            assert await rival.lock("x").try_acquire() is None
            await lease.release()
            await gets_the_lock(rival, "x")


@pytest.mark.parametrize("mode", ["lease", "session"])
async def test_a_turn_whose_message_is_lost_is_noticed(deployment, mode):
    """The server made us the first in line, and we never heard of it."""
    async with (
        Proxy(deployment.server.host, deployment.server.port, framing=mysql_frames) as proxy,
        deployment.connect(mode, port=proxy.port, ttl=2) as client,
        deployment.connect(mode) as rival,
    ):
        lease = await rival.lock("x", ttl=2).acquire()
        waiter = asyncio.create_task(client.lock("x").acquire())
        await until(lambda: blocked(deployment))
        lost = proxy.down.drop_next(3, lambda frame: b"GET_LOCK" not in frame)
        await lease.release()
        await lost.wait()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()


async def test_a_session_that_is_silent_keeps_nobody_waiting_who_comes_later(deployment):
    """One that has locks is not given up before its term, and its renewals must not hold up those of others."""
    async with deployment.connect("session", ttl=20) as client:
        lease = await client.lock("x").acquire()
        session = await client._backend.sessions.main()
        asked = [asyncio.create_task(session.run("DO SLEEP(60)", blocks=True, limit=0.3))]
        asked += [asyncio.create_task(session.run("DO 0")) for _ in range(3)]
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for one in asked:
            with pytest.raises(BackendUnavailable, match="no answer in time"):
                await one
        with pytest.raises(BackendUnavailable, match="no answer in time"):
            await session.run("DO 0")
        # Long before the server has answered.
        assert loop.time() - begun < 15
        assert session.alive
        await as_root(deployment.server, f"KILL QUERY {session.id}")

        async def answers() -> bool:
            try:
                await session.run("DO 0")
            except BackendUnavailable:
                return False
            return True

        await until(answers)
        lease.check()
        await lease.release()
