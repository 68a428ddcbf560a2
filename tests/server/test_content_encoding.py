"""Large answers have an entity tag and are compressed for who accepts it."""

from __future__ import annotations

import gzip

import pytest

from flowfabric.server.content_encoding import MIN_BYTES, encode_response
from flowfabric.server.routing import Response

LARGE = Response(200, b'{"a":"' + b"x" * MIN_BYTES + b'"}', "application/json")
GZIP = {b"accept-encoding": b"deflate, gzip;q=0.5"}


def test_a_large_answer_is_compressed_and_says_so() -> None:
    answer = encode_response("GET", GZIP, LARGE)

    headers = dict(answer.headers)
    assert gzip.decompress(answer.body) == LARGE.body
    assert (headers["content-encoding"], headers["vary"]) == ("gzip", "accept-encoding")
    assert answer.content_type == LARGE.content_type


@pytest.mark.parametrize("accepted", [b"", b"br", b"gzip;q=0", b"identity"])
def test_only_clients_that_accept_gzip_get_it(accepted: bytes) -> None:
    answer = encode_response("GET", {b"accept-encoding": accepted}, LARGE)

    assert answer.body == LARGE.body
    assert "content-encoding" not in dict(answer.headers)


def test_an_unchanged_answer_is_304() -> None:
    tag = dict(encode_response("GET", {}, LARGE).headers)["etag"]

    same = encode_response("GET", {b"if-none-match": f'"other", {tag}'.encode()}, LARGE)
    changed = encode_response(
        "GET", {b"if-none-match": tag.encode()}, Response(200, LARGE.body + b" ", "application/json")
    )

    assert (same.status, same.body, dict(same.headers)["etag"]) == (304, b"", tag)
    assert changed.status == 200


@pytest.mark.parametrize(
    ("method", "response"),
    [
        ("POST", LARGE),
        ("GET", Response(200, b"{}", "application/json")),
        ("GET", Response(404, LARGE.body, "application/json")),
        ("GET", Response(200, LARGE.body, "application/octet-stream")),
        ("GET", Response(200, LARGE.body, "application/json", (("cache-control", "no-store"),))),
    ],
)
def test_other_answers_are_left_alone(method: str, response: Response) -> None:
    assert encode_response(method, GZIP, response) is response
