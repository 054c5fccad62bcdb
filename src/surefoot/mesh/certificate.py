"""TLS for connections that leave the machine: a key and a certificate of this process, made at its start.

The certificate says nothing about who its holder is, and nobody verifies it. Its fingerprint goes into the messages
by which both sides prove that they know the round's key (`surefoot.mesh.handshake`): somebody in the middle would
have to present another certificate, and the proof of one side would not fit the other's.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

# No clock has a say: who belongs to the run is decided by the key alone, which is the round's.
_BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
_END = datetime(2100, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a listener shows, and its fingerprint."""

    context: ssl.SSLContext
    fingerprint: str


def make_certificate() -> Certificate:
    """A new key (P-256) and its certificate, which live as long as this process."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "surefoot")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .sign(key, SHA256())
    )
    context = _tls_1_3(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _load(context, private + certificate.public_bytes(Encoding.PEM))
    return Certificate(context, fingerprint(certificate.public_bytes(Encoding.DER)))


@cache
def dialing_context() -> ssl.SSLContext:
    """TLS that takes any certificate: the proofs that follow say whose it is."""
    context = _tls_1_3(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def fingerprint(der: bytes) -> str:
    """SHA-256 of a certificate, as hex digits."""
    return sha256(der).hexdigest()


def _tls_1_3(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    # The library reads keys from files only; this one has no name and never reaches a disk.
    fd = os.memfd_create("surefoot-certificate", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=True) as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{fd}")
