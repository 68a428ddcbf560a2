"""URLs of the Valkey store: what each says, and which fix an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfabric.errors import InvalidInput
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey import ValkeyAddress, parse_url
from flowfabric.stores.valkey.slots import parse_redirect, slot_of


def test_a_url_names_the_server_the_user_and_the_database() -> None:
    address = parse_url("valkey://worker:p%40ss%3A%2F@cache.example:7000/3")

    assert address.hosts == (("cache.example", 7000),)
    assert (address.username, address.database, address.is_cluster, address.has_tls) == ("worker", 3, False, False)
    assert address.password is not None
    assert address.password.reveal() == "p@ss:/"
    assert "p@ss" not in repr(address)


def test_defaults_are_the_usual_port_no_user_and_no_confirmation() -> None:
    assert parse_url("valkey://localhost") == ValkeyAddress(hosts=(("localhost", 6379),))
    assert parse_url("redis://localhost") == ValkeyAddress(hosts=(("localhost", 6379),))


def test_a_cluster_has_several_hosts() -> None:
    address = parse_url("valkey+cluster://a:1,[::1]:2,c?wait=1&durability=fsync")

    assert address.hosts == (("a", 1), ("::1", 2), ("c", 6379))
    assert (address.is_cluster, address.wait, address.fsync) == (True, 1, True)


@pytest.mark.parametrize("url", ["valkeys://a", "rediss://a", "valkeys+cluster://a", "valkey://a?tls=1"])
def test_tls_verifies_the_server(url: str) -> None:
    context = parse_url(url).tls_context()

    assert context is not None
    assert context.check_hostname
    assert parse_url("valkey://a").tls_context() is None


def test_timeouts_of_the_url_replace_those_of_the_settings() -> None:
    address = parse_url("valkey://a?connect_timeout=1.5&command_timeout=3")

    assert address.deadlines(Deadlines()) == Deadlines(connect_s=1.5, command_s=3)
    assert parse_url("valkey://a").deadlines(Deadlines(command_s=7)) == Deadlines(command_s=7)


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("valkey://", "write valkey://host:6379/0"),
        ("valkey://host:0", "write valkey://host:6379/0"),
        ("valkey://host:port", "write valkey://host:6379/0"),
        ("valkey+cluster://a:1,,b:2", r"write valkey\+cluster://a:6379,b:6379"),
        ("valkey://a:1,b:2", r"write valkey\+cluster://a:6379,b:6379"),
        ("valkey://user@host", "write valkey://user:password@host"),
        ("valkey://host/main", "the number of a database"),
        ("valkey://host/-1", "the number of a database"),
        ("valkey://host?wait=two", "a whole number from 0 to 16"),
        ("valkey://host?wait=-1", "a whole number from 0 to 16"),
        ("valkey://host?wait=17", "a whole number from 0 to 16"),
        ("valkey://host?durability=always", "server or fsync"),
        ("valkey://host?tls=yes", "1 or 0"),
        ("valkey://host?tls_ca=/nowhere.pem", "is no file"),
        ("valkey://host?command_timeout=soon", "a number of seconds"),
        ("valkey://host?command_timeout=nan", "a number of seconds"),
        ("valkey://host?durable=1", "there are wait, durability"),
        ("memcached://host", "write valkey://"),
    ],
)
def test_a_wrong_url_is_refused_and_the_error_names_the_fix(url: str, fix: str) -> None:
    with pytest.raises(InvalidInput, match=fix):
        parse_url(url)


def test_files_of_tls_need_tls_and_each_other(tmp_path: Path) -> None:
    file = tmp_path / "some.pem"
    file.write_text("no certificate")

    with pytest.raises(InvalidInput, match="add tls=1"):
        parse_url(f"valkey://a?tls_ca={file}")
    with pytest.raises(InvalidInput, match="needs tls_cert"):
        parse_url(f"valkeys://a?tls_key={file}")
    with pytest.raises(InvalidInput, match="cannot be used for TLS"):
        parse_url(f"valkeys://a?tls_ca={file}").tls_context()


def test_a_slot_follows_from_the_text_in_the_first_braces() -> None:
    assert slot_of("123456789") == 0x31C3  # the check value of the specification
    assert slot_of("{fp:3}:execution") == slot_of(b"{fp:3}:f") == slot_of("fp:3")
    assert slot_of("{}:execution") != slot_of("")
    assert len({slot_of(f"{{fp:{number}}}") for number in range(256)}) == 256


def test_redirects_may_lack_a_host_or_have_one_of_version_6() -> None:
    asked = ("10.0.0.1", 6379)

    assert parse_redirect("MOVED 3999 127.0.0.1:6381", asked) == (3999, ("127.0.0.1", 6381))
    assert parse_redirect("ASK 3999 :6381", asked) == (3999, ("10.0.0.1", 6381))
    assert parse_redirect("MOVED 3999 ::1:6381", asked) == (3999, ("::1", 6381))
