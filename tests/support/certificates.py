"""Certificates for servers and clients of tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_authority(folder: Path, name: str) -> None:
    """Write NAME.crt and NAME.key of a certificate authority."""
    _openssl(
        folder,
        f"req -x509 -newkey ec:/dev/stdin -nodes -subj /CN={name} -keyout {name}.key -out {name}.crt "
        "-addext keyUsage=critical,keyCertSign,cRLSign",  # Python 3.13 asks for it
    )


def make_certificate(folder: Path, holder: str, *, names: str) -> None:
    """Write HOLDER.crt, which the authority `ca` has signed for these names (DNS:..., IP:...), and HOLDER.key."""
    (folder / "names").write_text(f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\nbasicConstraints=CA:FALSE\n")
    _openssl(folder, f"req -newkey ec:/dev/stdin -nodes -subj /CN={holder} -keyout {holder}.key -out {holder}.csr")
    _openssl(
        folder,
        f"x509 -req -in {holder}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out {holder}.crt",
    )


def _openssl(folder: Path, arguments: str) -> None:
    curve = subprocess.run(["openssl", "ecparam", "-name", "prime256v1"], capture_output=True, check=True).stdout
    subprocess.run(["openssl", *arguments.split()], cwd=folder, input=curve, capture_output=True, check=True)
