"""nginx as a reverse proxy that ends TLS, run by the configuration that docs/operations.md gives."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import ssl
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.waiting import until

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

_FRAME = """
daemon off;
worker_processes 1;
error_log {folder}/error.log;
pid {folder}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/t1;
    proxy_temp_path {folder}/t2;
    fastcgi_temp_path {folder}/t3;
    uwsgi_temp_path {folder}/t4;
    scgi_temp_path {folder}/t5;
{servers}
}}
"""


class PrivateAuthority:
    """A certificate authority of one test, and a certificate for localhost that it signed, in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.file, self.certificate, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a private authority")])
        signing = ec.generate_private_key(ec.SECP256R1())
        authority = (
            _builder(name, name, signing.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(signing, hashes.SHA256())
        )
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
        certificate = (
            _builder(subject, name, key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer, critical=False)
            .sign(signing, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        self.file.write_bytes(authority.public_bytes(pem))
        self.certificate.write_bytes(certificate.public_bytes(pem))
        self.key.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )

    def context(self) -> ssl.SSLContext:
        """What a client that trusts this authority alone uses."""
        return ssl.create_default_context(cafile=str(self.file))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def documented_server(authority: PrivateAuthority, *, port: int, target: int, with_map: bool) -> str:
    """The documentation's example for one daemon, with this test's name, files and ports put in."""
    found = re.search(r"```nginx\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    text = found[1]
    changes = {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "swarm.example;": "localhost;",
        "/etc/ssl/swarm.example.pem": str(authority.certificate),
        "/etc/ssl/swarm.example.key": str(authority.key),
        "http://127.0.0.1:8420": f"http://127.0.0.1:{target}",
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text if with_map else text[text.index("server {") :]


def _configure(folder: Path, servers: Sequence[str]) -> Path:
    folder.mkdir()
    configuration = folder / "nginx.conf"
    user = "user root;\n" if os.geteuid() == 0 else ""  # its workers write into this folder
    configuration.write_text(user + _FRAME.format(folder=folder, servers="\n".join(servers)))
    return configuration


@asynccontextmanager
async def nginx(folder: Path, *servers: str) -> AsyncIterator[Path]:
    """nginx with these servers, in a process of its own; gives its access log."""
    assert NGINX is not None
    configuration = _configure(folder, servers)
    running = await asyncio.create_subprocess_exec(
        NGINX, "-c", str(configuration), "-e", str(folder / "error.log"), stdin=DEVNULL, stderr=DEVNULL
    )
    try:
        errors = folder / "error.log"

        def is_up() -> bool:
            assert running.returncode is None, errors.read_text()
            pid = folder / "nginx.pid"
            return pid.exists() and bool(pid.read_text().strip())

        await until(is_up, timeout=20, what="nginx")
        yield folder / "access.log"
    finally:
        if running.returncode is None:
            running.terminate()
        async with asyncio.timeout(20):
            await running.wait()
