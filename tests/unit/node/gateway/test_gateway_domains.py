"""The names a signed action may be bound to: those a client can rightly have configured, and no others."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvasir_console.errors import ConfigError
from kvasir_console.node.gateway.domains import own_domains
from kvasir_console.node.gateway.info import cluster_of


def certificate(directory: Path, *names: x509.GeneralName) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ignored.example")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    file = directory / "cert.pem"
    file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return file


def test_this_machine_has_aliases() -> None:
    assert own_domains("127.0.0.1", 8791, None) == ("127.0.0.1:8791", "localhost:8791", "[::1]:8791")
    assert own_domains("localhost", 8791, None)[0] == "localhost:8791"
    assert own_domains("::1", 8791, None)[0] == "[::1]:8791"


def test_the_schemes_own_port_may_be_left_out(tmp_path: Path) -> None:
    assert own_domains("127.0.0.1", 80, None)[:2] == ("127.0.0.1", "127.0.0.1:80")
    cert = certificate(tmp_path, x509.DNSName("Gate.Example.net"))
    assert own_domains("203.0.113.5", 443, cert) == (
        "203.0.113.5",
        "203.0.113.5:443",
        "gate.example.net",
        "gate.example.net:443",
    )


def test_a_certificate_proves_its_names(tmp_path: Path) -> None:
    names = (
        x509.DNSName("gate.example.net"),
        x509.DNSName("*.example.net"),
        x509.IPAddress(ipaddress.ip_address("203.0.113.5")),
    )
    cert = certificate(tmp_path, *names)
    assert own_domains("0.0.0.0", 8443, cert) == ("gate.example.net:8443", "203.0.113.5:8443")  # noqa: S104 - it is the case


def test_a_local_certificate_brings_all_local_names(tmp_path: Path) -> None:
    cert = certificate(tmp_path, x509.DNSName("localhost"))
    assert set(own_domains("127.0.0.1", 9, cert)) == {"127.0.0.1:9", "localhost:9", "[::1]:9"}


def test_a_certificate_without_names_proves_none(tmp_path: Path) -> None:
    assert own_domains("203.0.113.5", 8443, certificate(tmp_path)) == ("203.0.113.5:8443",)


def test_an_unreadable_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("no certificate")
    for bad in (file, tmp_path / "absent.pem"):
        with pytest.raises(ConfigError, match=bad.name):
            own_domains("127.0.0.1", 8443, bad)


@pytest.mark.parametrize(
    ("url", "cluster"),
    [
        ("https://api.devnet.solana.com", "devnet"),
        ("https://api.mainnet-beta.solana.com", "mainnet-beta"),
        ("https://api.testnet.solana.com", "testnet"),
        ("http://127.0.0.1:8899", "localnet"),
        ("https://rpc.example.net", "custom"),
    ],
)
def test_a_cluster_goes_by_its_url(url: str, cluster: str) -> None:
    assert cluster_of(url) == cluster
