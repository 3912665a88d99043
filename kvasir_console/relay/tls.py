"""TLS contexts of the relay and the rule for doing without: loopback only."""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path

from kvasir_console.errors import ConfigError


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """A context for the front port: TLS 1.2 or newer, HTTP/1.1 only.

    Args:
        cert: PEM file with the certificate, then any intermediates.
        key: PEM file with its private key, unencrypted.

    Raises:
        ConfigError: a file cannot be read, is not PEM, or the two do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # An empty password, so that an encrypted key is refused instead of prompting on the terminal.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "tls_files_refused",
            f"The certificate {cert} and key {key} cannot be used: {_words(error)}.",
            "Give a PEM certificate chain and its unencrypted PEM key as gateway.tls_cert and gateway.tls_key.",
        ) from error
    return context


def client_context(ca_file: str | Path | None = None) -> ssl.SSLContext:
    """A verifying client context that trusts the system's authorities and, if given, those in ``ca_file`` (PEM).

    Raises:
        ConfigError: ``ca_file`` cannot be read or holds no certificate.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_file:
        try:
            context.load_verify_locations(cafile=ca_file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "ca_file_refused",
                f"The certificate authority file {ca_file} cannot be used: {_words(error)}.",
                "Set network.ca_file to a PEM file, or leave it empty to trust the system's authorities only.",
            ) from error
    return context


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine by definition (RFC 6761 ``localhost``, 127.0.0.0/8, ::1)."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").replace("_", " ").lower()
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)
