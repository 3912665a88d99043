from __future__ import annotations

import asyncio
import ssl

import pytest
from cryptography.hazmat.primitives import serialization

from kvasir_console.errors import ConfigError
from kvasir_console.relay.tls import client_context, is_loopback, server_context

from tls import make_tls_files


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.8.9.10", "::1", "[::1]"])
def test_loopback_hosts(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "192.0.2.1", "::", "10.0.0.1", "localhost.example.org", "127.0.0.1.example.org", "gate.kvasir-ai.net"]
)
def test_hosts_that_may_be_another_machine(host):
    assert not is_loopback(host)


async def test_our_contexts_shake_hands_over_tls_1_3(tls_files):
    await _handshake(tls_files, client_context(tls_files.ca), ssl.TLSVersion.TLSv1_3)


async def test_tls_1_2_is_accepted_and_1_1_is_not(tls_files):
    old = client_context(tls_files.ca)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    await _handshake(tls_files, old, ssl.TLSVersion.TLSv1_2)
    assert server_context(tls_files.cert, tls_files.key).minimum_version is ssl.TLSVersion.TLSv1_2
    assert client_context().minimum_version is ssl.TLSVersion.TLSv1_2


async def test_an_authority_nobody_named_is_not_trusted(tls_files):
    with pytest.raises(ssl.SSLCertVerificationError):
        await _handshake(tls_files, client_context(), ssl.TLSVersion.TLSv1_3)


def test_a_key_of_another_certificate_is_refused(tls_files, tmp_path):
    other = make_tls_files(tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot be used") as refusal:
        server_context(tls_files.cert, other.key)
    assert refusal.value.code == "tls_files_refused"
    assert "gateway.tls_cert" in refusal.value.hint


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(tls_files, tmp_path):
    key = serialization.load_pem_private_key(tls_files.key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError):
        server_context(tls_files.cert, locked)


def test_missing_files_are_named(tmp_path, tls_files):
    with pytest.raises(ConfigError, match="nowhere"):
        server_context(tmp_path / "nowhere.pem", tls_files.key)
    with pytest.raises(ConfigError, match="nowhere"):
        client_context(tmp_path / "nowhere.pem")


def test_a_file_without_a_certificate_is_refused(tmp_path):
    text = tmp_path / "ca.pem"
    text.write_text("this is no certificate")
    with pytest.raises(ConfigError, match="cannot be used") as refusal:
        client_context(text)
    assert refusal.value.code == "ca_file_refused"


async def _handshake(files, client, version):
    async def serve(reader, writer):
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context(files.cert, files.key))
    try:
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("localhost", port, ssl=client, family=2)
        negotiated = writer.get_extra_info("ssl_object").version()
        writer.close()
        assert negotiated == version.name.replace("TLSv1_", "TLSv1.")
    finally:
        server.close()
