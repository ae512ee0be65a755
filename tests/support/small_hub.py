"""A stand-in for the Hugging Face Hub on loopback: models and datasets from local folders, one name is gated."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = "tests/gated"
_PATH = re.compile(r"/(?:api/)?(?:(models|datasets)/)?([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+)(?:/(.+))?")


@contextmanager
def small_hub(models: Mapping[str, Path], datasets: Mapping[str, Path] | None = None) -> Iterator[str]:
    """Serve the folders by name and yield the address, for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            asked = _PATH.fullmatch(self.path.partition("?")[0])
            if asked is None:
                self._send(404, b"")
                return
            kind, name, what, revision, file = asked.groups()
            folder = self._folder(kind, name, revision)
            if folder is None:
                return
            headers, files = dict[str, str](), sorted(path for path in folder.rglob("*") if path.is_file())
            names = [path.relative_to(folder).as_posix() for path in files]
            match what:
                case "revision":
                    listed = [{"rfilename": each} for each in names]
                    body = json.dumps({"id": name, "sha": COMMIT, "siblings": listed}).encode()
                case "tree":
                    tree = [
                        {"type": "file", "path": each, "size": path.stat().st_size, "oid": "0"}
                        for each, path in zip(names, files, strict=True)
                    ]
                    body = json.dumps(tree).encode()
                case _:
                    body = (folder / file).read_bytes()
                    headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(200, body, with_body=with_body, headers=headers)

        def _folder(self, kind: str | None, name: str, revision: str) -> Path | None:
            """The folder of a model or dataset; None after an answer that refuses."""
            served = (datasets if datasets is not None else {}) if kind == "datasets" else models
            if name == GATED:
                self._send(403, b"", headers={"X-Error-Code": "GatedRepo"})
            elif name not in served:
                self._send(401, b"", headers={"X-Error-Code": "RepoNotFound"})
            elif revision not in ("main", COMMIT):
                self._send(404, b"", headers={"X-Error-Code": "RevisionNotFound"})
            else:
                return served[name]
            return None

        def _send(self, status: int, body: bytes, *, with_body: bool = True, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="hub")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
