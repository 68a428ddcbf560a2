"""Users, passwords, databases and TLS on a real server."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flowfabric.clock import ManualClock
from flowfabric.connector import open_engine
from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.stores.valkey import parse_url
from flowfabric.stores.valkey.store import ValkeyStore
from tests.blackhole import BlackHole
from tests.conftest import REDIS
from tests.executions import new_execution
from tests.stores.unavailable import unavailable
from tests.stores.valkey.conftest import connected
from tests.stores.valkey.test_functions import use_everything
from tests.valkey_servers import ValkeyNode, ValkeyServers, leave, redis, unused_port, valkey

USER = "ff_access"


@pytest.fixture
def server(valkey_url: str) -> ValkeyServers:
    servers = valkey()
    rights = ("~*", "&*", "+@all", "-config")
    servers.nodes[0].execute("ACL", "SETUSER", USER, "reset", "on", ">p@ss word", *rights)
    return servers


def url_as(server: ValkeyServers, user_info: str) -> str:
    return server.url(server.own_database()).replace("://", f"://{user_info}@")


async def test_a_user_of_the_acl_connects_with_its_password(server: ValkeyServers) -> None:
    async with connected(url_as(server, f"{USER}:p%40ss%20word")) as client:
        assert await client.call("a", "ACL", "WHOAMI") == USER.encode()
        assert await client.call("a", "SET", "a", 1) == b"OK"


async def test_a_wrong_password_is_an_error_of_authentication_not_in_doubt(server: ValkeyServers) -> None:
    with pytest.raises(StoreUnavailable, match="WRONGPASS") as caught:
        async with connected(url_as(server, f"{USER}:guess")):
            pass

    assert (caught.value.in_doubt, caught.value.source) == (False, StoreFault.AUTH)
    assert "guess" not in str(caught.value)


async def test_a_command_that_the_user_may_not_send_is_an_error_of_authentication(server: ValkeyServers) -> None:
    async with connected(url_as(server, f"{USER}:p%40ss%20word")) as client:
        with pytest.raises(StoreUnavailable, match="NOPERM") as caught:
            await client.call("a", "CONFIG", "GET", "maxmemory")

    assert (caught.value.in_doubt, caught.value.source) == (False, StoreFault.AUTH)


async def test_a_user_with_no_more_rights_than_documented_can_do_everything(
    server: ValkeyServers, clock: ManualClock
) -> None:
    rights = documented_rights()
    server.nodes[0].execute("ACL", "SETUSER", USER, "reset", "on", ">p@ss word", *rights)
    url = url_as(server, f"{USER}:p%40ss%20word")
    store = ValkeyStore(parse_url(url), clock)
    await store.open(migrate=True)
    await use_everything(store)
    await store.close()

    async with await open_engine(url) as engine, await open_engine(url) as waiting:
        who: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
        claim = asyncio.create_task(waiting.claim_many("mail", 1, **who, max_wait_ms=20_000))
        await engine.create_execution(execution_id=engine.new_execution_id("mail"), lane_id="mail", idempotency_key="k")
        (claimed,) = await claim
        await waiting.complete(claimed.handle, result=b"done")
        assert str(await engine.read_execution_state(claimed.execution_id)) == "completed"
    async with connected(url) as client:
        for forbidden in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("SET", "other", 1)):
            with pytest.raises(StoreUnavailable, match="NOPERM"):
                await client.call("{ff}", *forbidden)


def documented_rights() -> list[str]:
    """Return the rights that docs/valkey.md names."""
    page = Path(__file__).parents[3].joinpath("docs", "valkey.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("ACL SETUSER")]
    return line.partition(">secret ")[2].split()


async def test_a_url_names_the_database(server: ValkeyServers) -> None:
    own = server.own_database()
    async with connected(server.url(own)) as client, connected(server.url(own)) as same:
        await client.call("a", "SET", "a", 1)
        assert await same.read("a", "GET", "a") == b"1"
        assert f" db={own} " in (await client.call("a", "CLIENT", "INFO")).decode()


async def test_a_database_that_the_server_does_not_have_is_refused(server: ValkeyServers) -> None:
    with unavailable("DB index is out of range", in_doubt=False):
        async with connected(server.url(99_999)):
            pass


# --- TLS: the server of the wheel has none, so a proxy terminates it; the system's Redis has TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a certificate for 127.0.0.1 that it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    signed = builder.sign(key, hashes.SHA256())
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.fixture
async def tls_port(server: ValkeyServers, certificate: Path) -> AsyncIterator[Callable[[], int]]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    proxy = BlackHole("127.0.0.1", server.nodes[0].port)
    listener = await asyncio.start_server(proxy.accept, "127.0.0.1", 0, ssl=context)
    yield lambda: listener.sockets[0].getsockname()[1]
    listener.close()
    await proxy.close()


async def test_commands_and_large_values_travel_over_tls(
    server: ValkeyServers, tls_port: Callable[[], int], certificate: Path
) -> None:
    async with connected(f"valkeys://127.0.0.1:{tls_port()}/{server.own_database()}?tls_ca={certificate}") as client:
        value = b"x" * (3 << 20)
        await client.call("tls", "SET", "tls", value)
        assert await client.read("tls", "GET", "tls") == value


async def test_a_certificate_of_an_unknown_authority_is_refused(tls_port: Callable[[], int]) -> None:
    with unavailable("(?i)certificate verify failed", in_doubt=False):
        async with connected(f"valkeys://127.0.0.1:{tls_port()}"):
            pass


async def test_a_server_without_tls_is_reported(server: ValkeyServers) -> None:
    with unavailable(in_doubt=False):
        async with connected(f"valkeys://127.0.0.1:{server.nodes[0].port}?connect_timeout=2"):
            pass


if REDIS:  # where it is installed

    @pytest.fixture
    def tls_node(certificate: Path) -> Iterator[ValkeyNode]:
        """A server that speaks TLS on another port, and wants a certificate from its clients."""
        servers = redis(f"tls-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}")
        (node,) = servers.nodes
        node.kill()
        files = dict.fromkeys(("tls_cert_file", "tls_key_file", "tls_ca_cert_file"), str(certificate))
        node.start(tls_port=str(unused_port()), tls_auth_clients="yes", **files)
        yield node
        leave(servers)

    async def test_an_engine_works_over_tls_with_a_certificate_of_its_own(
        tls_node: ValkeyNode, certificate: Path
    ) -> None:
        port = tls_node.execute("CONFIG", "GET", "tls-port")[1]
        url = f"rediss://127.0.0.1:{port}/0?tls_ca={certificate}&connect_timeout=2"
        with unavailable(in_doubt=False):
            async with await open_engine(url):
                pass

        async with await open_engine(f"{url}&tls_cert={certificate}&tls_key={certificate}") as engine:
            name = await new_execution(engine, input_payload=b"x" * (1 << 20))
            (claimed,) = await engine.claim_many("default", 1, worker_id="w", worker_instance_id="w-1")
            await engine.complete(claimed.handle, result=b"done")
            assert str(await engine.read_execution_state(name)) == "completed"
