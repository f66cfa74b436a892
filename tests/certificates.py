"""A throwaway certificate authority and one certificate signed by it, made with the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.processes import ServerFailed, program

# The extensions are spelled out, because the system's own openssl.cnf may add, lack or repeat some of them, and because
# Python 3.13 checks them strictly.
_CONFIG = """
[req]
prompt = no
distinguished_name = subject
[subject]
CN = aiolock tests
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


class Certificates:
    """`ca`, `cert` and `key` are paths of PEM files; `cert` is for `names` and may serve a client as well."""

    def __init__(self, folder: Path, *, names: str = "IP:127.0.0.1, DNS:localhost") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca, self.cert, self.key = folder / "ca.crt", folder / "server.crt", folder / "server.key"
        (folder / "openssl.cnf").write_text(_CONFIG.format(names=names))
        self._sign("authority", "ca.key", "ca.crt")
        self._sign("server", "server.key", "server.crt", "-CA", "ca.crt", "-CAkey", "ca.key")

    def _sign(self, section: str, key: str, certificate: str, *authority: str) -> None:
        openssl = program("openssl", package="openssl", server="redis")
        request = [
            openssl,
            "req",
            "-x509",
            "-config",
            "openssl.cnf",
            "-extensions",
            section,
            "-days",
            "2",
            "-nodes",
        ]
        fresh_key = [
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-keyout",
            key,
            "-out",
            certificate,
        ]
        done = subprocess.run(
            [*request, *fresh_key, *authority], cwd=self._folder, capture_output=True, check=False
        )
        if done.returncode:
            raise ServerFailed(
                f"openssl could not make {certificate}: {done.stderr.decode(errors='replace')}"
            )
