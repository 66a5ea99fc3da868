"""Throwaway authorities and certificates, made with the `openssl` command (Debian: apt-get install openssl)."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from lynx_net import TlsConfig

if TYPE_CHECKING:
    from pathlib import Path

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, stdin=subprocess.DEVNULL)


class Authority:
    """Signs certificates; all files lie in `folder`, each certificate with its key in one file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.file = self.folder / "ca.pem"
        self._key = self.folder / "ca.key"
        subject = ("-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign", "-days", 2)
        _openssl("req", "-x509", *EC, *subject, "-keyout", self._key, "-out", self.file)
        # `openssl ca` is the one subcommand that takes a date in the past, for certificates that are expired.
        (self.folder / "index").touch()
        (self.folder / "settings").write_text(
            f"[ca]\ndefault_ca=own\n[own]\nnew_certs_dir={self.folder}\ndatabase={self.folder}/index\nrand_serial=yes\n"
            f"default_md=sha256\npolicy=any\nunique_subject=no\ncopy_extensions=copy\n[any]\ncommonName=supplied\n"
        )

    def issue(
        self, name: str, *, names: str = "IP:127.0.0.1,IP:::1,DNS:localhost", end: str = "20991231000000Z"
    ) -> Path:
        """A certificate for these names, and its key, in one PEM file."""
        file, key, request = (self.folder / f"{name}.{kind}" for kind in ("pem", "key", "request"))
        _openssl(
            "req",
            "-new",
            *EC,
            "-subj",
            f"/CN={name}",
            "-addext",
            f"subjectAltName={names}",
            "-keyout",
            key,
            "-out",
            request,
        )
        own = ("-config", self.folder / "settings", "-cert", self.file, "-keyfile", self._key, "-batch", "-notext")
        _openssl("ca", *own, "-startdate", "20200101000000Z", "-enddate", end, "-in", request, "-out", file)
        with file.open("a") as out:
            out.write(key.read_text())
        return file


class Certificates:
    """What the tests of TLS use: two authorities, and certificates good and bad."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            raise RuntimeError("the tests of TLS need the openssl command; on Debian run: apt-get install openssl")
        self.folder = folder
        self.ours = Authority(folder, "ours")
        self.others = Authority(folder, "others")
        self.node = self.ours.issue("node")
        self.expired = self.ours.issue("expired", end="20210101000000Z")
        self.elsewhere = self.ours.issue("elsewhere", names="DNS:elsewhere.example")
        self.stranger = self.others.issue("stranger")

    def config(self, **changes: Any) -> TlsConfig:
        """A node that all other nodes believe."""
        return TlsConfig(**({"certificate": self.node, "ca_file": self.ours.file} | changes))

    def lock(self, file: Path, password: str) -> Path:
        """The private key of a certificate, encrypted."""
        locked = self.folder / "locked.key"
        _openssl("pkey", "-in", file, "-aes256", "-passout", f"pass:{password}", "-out", locked)
        return locked
