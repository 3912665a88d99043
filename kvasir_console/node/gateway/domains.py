"""The names this gateway goes by: what a signed action may be bound to, and the URL it announces."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from cryptography import x509

from kvasir_console.errors import ConfigError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def own_domains(host: str, port: int, certificate: Path | None) -> tuple[str, ...]:
    """``host:port`` of every name a client can rightly have configured, in lower case, the preferred one first.

    A certificate proves its names. An address of this machine has the others of this machine as aliases. The port is
    left out where it is the scheme's own.

    Raises:
        ConfigError: the certificate cannot be read.
    """
    names = list(_certificate_names(certificate)) if certificate is not None else []
    if not _is_wildcard(host):
        names.insert(0, host)
    if any(_is_loopback(name) for name in names) or not names:
        names += _LOOPBACK
    default_port = 443 if certificate is not None else 80
    domains: list[str] = []
    for name in names:
        shown = f"[{name}]" if ":" in name else name.lower()
        domains += [f"{shown}:{port}"] if port != default_port else [shown, f"{shown}:{port}"]
    return tuple(dict.fromkeys(domains))


def _certificate_names(file: Path) -> list[str]:
    try:
        certificate = x509.load_pem_x509_certificates(file.read_bytes())[0]
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(
            "tls_certificate", f"The certificate {file} cannot be read.", "Set gateway.tls_cert to a PEM chain."
        ) from error
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [name for name in names.get_values_for_type(x509.DNSName) if not name.startswith("*")] + addresses


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host
