"""A hub on loopback that holds one data set: what `datasets` and `huggingface_hub` ask of it."""

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_REPO = r"/(?:api/)?datasets/([^/]+/[^/]+)"
_INFO = re.compile(rf"{_REPO}(?:/revision/[^/]+)?")
_TREE = re.compile(rf"{_REPO}/tree/[^/]+(?:/(.*))?")
_PATHS = re.compile(rf"{_REPO}/paths-info/[^/]+")
_FILE = re.compile(rf"{_REPO}/resolve/[^/]+/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "HubServer"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        hub = self.server
        if found := _FILE.fullmatch(path):
            self._send_file(found[1], found[2])
        elif (found := _TREE.fullmatch(path)) and found[1] == hub.repository:
            wanted = parse_qs(urlsplit(self.path).query).get("recursive", ["False"])[0]
            self._json(hub.listing(found[2] or "", wanted.lower() == "true"))
        elif (found := _INFO.fullmatch(path)) and found[1] == hub.repository:
            names = [{"rfilename": name} for name in hub.files]
            self._json({"id": hub.repository, "sha": hub.commit, "siblings": names, "tags": []})
        else:
            self._refuse("RepoNotFound" if path.startswith("/api/") else "EntryNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if not _PATHS.fullmatch(urlsplit(self.path).path):
            self._refuse("EntryNotFound")
            return
        wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        everything = self.server.listing("", True)
        self._json([each for each in everything if each["path"] in wanted])

    def _send_file(self, repository: str, name: str) -> None:
        hub = self.server
        hub.asked[f"{self.command} {name}"] += 1
        data = hub.files.get(name) if repository == hub.repository else None
        if data is None:
            self._refuse("EntryNotFound")
            return
        headers = {"X-Repo-Commit": hub.commit, "ETag": f'"{_oid(data)}"', "Accept-Ranges": "bytes"}
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, data, headers)
            return
        start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        hub.sent_bytes += stop - start
        self._answer(206, data[start:stop], headers)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: str) -> None:
        self._answer(404, b"{}", {"X-Error-Code": code, "X-Repo-Commit": self.server.commit})

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class HubServer(ThreadingHTTPServer):
    """`files` by their names in the repository; a commit is a hash of them."""

    daemon_threads = True

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository = repository
        self.files = files
        self.asked: Counter[str] = Counter()
        self.sent_bytes = 0
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def commit(self) -> str:
        """Of what is there now."""
        whole = b"".join(name.encode() + data for name, data in sorted(self.files.items()))
        return hashlib.sha1(whole).hexdigest()

    def listing(self, folder: str, is_deep: bool) -> list[dict[str, Any]]:
        """The tree below a folder, as the hub says it."""
        found: dict[str, dict[str, Any]] = {}
        head = f"{folder}/" if folder else ""
        for name, data in sorted(self.files.items()):
            if not name.startswith(head):
                continue
            parts = name[len(head) :].split("/")
            for depth in range(1, len(parts)):
                path = head + "/".join(parts[:depth])
                found[path] = {"type": "directory", "oid": _oid(path.encode()), "size": 0}
            found[name] = {"type": "file", "oid": _oid(data), "size": len(data)}
        listed = [{**each, "path": path} for path, each in found.items()]
        return [each for each in listed if is_deep or "/" not in each["path"][len(head) :]]

    def environment(self, cache: str) -> dict[str, str]:
        """Of a process that is to know no other hub."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HOME": cache,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def close(self) -> None:
        self.shutdown()
        self.server_close()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
