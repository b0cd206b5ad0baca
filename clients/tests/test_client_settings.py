"""A client refuses wrong settings of its connection and wrong inputs of a request before it sends anything."""

from __future__ import annotations

import re

import pytest
import tritonclient.http

from hplm_client import AsyncHplmClient, HplmClient, InvalidInput, wire
from hplm_client.settings import Settings


@pytest.mark.parametrize("kind", [HplmClient, AsyncHplmClient])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(({"url": url}, url.removeprefix("https://")) for url in (
            "http://127.0.0.1:8000", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:8000/path", "https://door/path", "https://door:x",
            "HTTPS:door:443",
        )),
        ({"url": "https://"}, ""),
        ({"protocol": "https"}, "'https'"),
        *(({"api_key": key}, "ASCII") for key in ("two\nlines", "schlüssel", "")),
        ({"network_timeout": 0}, "network_timeout 0"),
        ({"network_timeout": float("inf")}, "network_timeout inf"),
        ({"retries": -1}, "retries -1"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_at_once(kind, settings, named):
    with pytest.raises(InvalidInput, match=re.escape(named)) as caught:
        kind(**{"url": "127.0.0.1:8000", **settings})
    assert "schl" not in str(caught.value), "a key does not belong into a message"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_file_that_holds_no_certificate_is_refused_at_once(protocol, tmp_path):
    no_certificate = tmp_path / "key.pem"
    no_certificate.write_text("-----BEGIN PRIVATE KEY-----\n")
    for path in (tmp_path / "missing.pem", no_certificate, tmp_path):
        for kind in (HplmClient, AsyncHplmClient):
            with pytest.raises(InvalidInput, match=re.escape(str(path))):
                kind("127.0.0.1:443", protocol, ca_file=path)


def test_https_has_a_usual_port_and_a_key_is_not_shown():
    given = ("https://door.example.com", "https://door.example.com:8443", "https://[::1]", "127.0.0.1:8000")
    known = [Settings(url, api_key="s3cret") for url in given]
    assert [one.address for one in known] == ["door.example.com:443", "door.example.com:8443", "[::1]:443", "127.0.0.1:8000"]
    assert [one.context is not None for one in known] == [True, True, True, False]
    assert "s3cret" not in repr(known)


def question(texts=("a",), tenant="acme", pairs=None):
    return wire.encode(wire.Question(texts, tenant, pairs), tritonclient.http)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"texts": []}, []),
        ({"texts": "abc"}, ["str"]),
        ({"pairs": "b"}, ["str"]),
        ({"tenant": ""}, ["tenant"]),
        ({"tenant": "acme\0x"}, ["tenant", "NUL"]),
        ({"texts": ["a", "b"], "pairs": ["c"]}, ["2", "1"]),
        ({"texts": ["a", b"b"]}, ["TEXT 1", "bytes"]),
        ({"pairs": [None]}, ["TEXT_PAIR 0", "NoneType"]),
        ({"texts": ["\ud800"]}, ["TEXT 0", "UTF-8"]),
    ],
)
def test_wrong_inputs_are_refused_before_they_are_sent(given, named):
    with pytest.raises(InvalidInput) as caught:
        question(**given)
    assert all(re.search(rf"\b{thing}\b", str(caught.value)) for thing in named)


@pytest.mark.parametrize("tenant", [None, 7, "", "a b", "é", "a\r\nx: y"])
def test_a_name_that_is_no_value_of_a_header_is_not_sent_in_one(tenant):
    key = {"authorization": "Bearer K3Y"}
    assert Settings("a:1", api_key="K3Y").headers_for({"tenant": tenant} if tenant is not None else {}) == key
