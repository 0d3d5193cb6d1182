"""An S3 server on loopback behind a proxy that fails on purpose.

The server is moto's, the proxy ours: it passes requests on and, where its plan says so, answers
with an error of its own, cuts the connection before or after the server has done the work, or
sends an answer slowly or in part.
"""

import http.client
import logging
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from moto.server import ThreadedMotoServer

Fault = Literal["500", "503", "403", "reset", "lost", "slow", "cut", "hang"]
Plan = Callable[[str, str], Fault | None]  # of method and path

FAULTS: tuple[Fault, ...] = ("500", "503", "reset", "lost", "slow", "cut")
_WORDS = {"500": "InternalError", "503": "SlowDown", "403": "AccessDenied"}
_KEPT_OUT = {"connection", "transfer-encoding", "content-length", "keep-alive"}
SLOW_S = 0.05


def no_faults(method: str, path: str) -> Fault | None:
    return None


class Chaos:
    """A share of all requests fails, each in one of the ways, as seeded dice fall."""

    def __init__(self, seed: int, share: float) -> None:
        self._dice = random.Random(seed)
        self._share = share
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str) -> Fault | None:
        with self._lock:
            strikes = self._dice.random() < self._share
            return self._dice.choice(FAULTS) if strikes else None


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer waits for an acknowledgement
    server: "FaultyProxy"

    def _serve(self) -> None:
        body = self._body()
        fault = self.server.decide(self.command, self.path)
        if fault in _WORDS:
            self._refuse(int(fault))
        elif fault == "reset":
            self._cut()
        elif fault == "hang":
            self.server.released.wait(120)
            self._cut()
        else:
            self._pass_on(body, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while num_bytes := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(num_bytes)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return found

    def _pass_on(self, body: bytes, fault: Fault | None) -> None:
        there = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=30)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _KEPT_OUT}
        there.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
        answer = there.getresponse()
        data = answer.read()
        there.close()
        self.server.sent_bytes += len(data)
        if fault == "lost":
            self._cut()
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _KEPT_OUT:
                self.send_header(name, value)
        own = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", own or "0")
        self.end_headers()
        self._send(data, fault)

    def _send(self, data: bytes, fault: Fault | None) -> None:
        half = len(data) // 2
        self.wfile.write(data[:half] if fault in ("slow", "cut") else data)
        self.wfile.flush()
        if fault == "cut":
            self._cut()
        elif fault == "slow":
            time.sleep(SLOW_S)
            self.wfile.write(data[half:])

    def _refuse(self, status: int) -> None:
        name = _WORDS[str(status)]
        text = f"<Error><Code>{name}</Code><Message>of the proxy</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _cut(self) -> None:
        """Ends the connection by a reset, as a crashed peer does."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.close()

    def finish(self) -> None:
        if self.connection.fileno() != -1:
            super().finish()


class FaultyProxy(ThreadingHTTPServer):
    """Listens on a port of its own before the server at port `behind`."""

    daemon_threads = True

    def __init__(self, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = behind
        self.plan: Plan = no_faults
        self.struck: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()  # by method
        self.sent_bytes = 0
        self.released = threading.Event()  # ends what hangs

    def decide(self, method: str, path: str) -> Fault | None:
        """What is to happen to a request; counted."""
        fault = self.plan(method, path)
        self.asked[method] += 1
        if fault is not None:
            self.struck[fault] += 1
        return fault

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients that are killed leave in the middle."""


class S3Server:
    """Both, with the names by which AWS's libraries find them."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for each request
        self._moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self._moto.start()
        self.port = self._moto.get_host_and_port()[1]
        self.proxy = FaultyProxy(self.port)
        threading.Thread(target=self.proxy.serve_forever, args=(0.05,), daemon=True).start()

    def environment(self) -> dict[str, str]:
        """Of a process that is to reach the server through the proxy."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.server_port}",
            "AWS_ACCESS_KEY_ID": "of-the-tests",
            "AWS_SECRET_ACCESS_KEY": "never-to-be-shown",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> None:
        there = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        there.request("PUT", f"/{name}")
        assert there.getresponse().status == 200, name
        there.close()

    def close(self) -> None:
        self.proxy.released.set()
        self.proxy.shutdown()
        self.proxy.server_close()
        self._moto.stop()
