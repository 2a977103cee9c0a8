"""Google's object store, as far as checkpoints need it: an emulator that speaks its protocol, in a process of its own.

    python -m tests.multiprocess.object_store PARENT

prints its port, and serves until its parent ends it or is gone.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock
from types import TracebackType

from elastic_train.launch.bond import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "bucket"

START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 30.0
STALLED_S = 60.0
"""How long a client may send or read nothing in the middle of a request."""

SHOWN_LINES = 100
REFUSE_ALL = "/refuse-all"
REFUSAL = "Anonymous caller does not have storage.objects.list access to the Google Cloud Storage bucket."
"""What Google's store answers somebody without credentials, with 401."""


class ObjectStore:
    """An empty bucket named `BUCKET`, there for the time of a `with` block.

    The last requests, and what went wrong, are printed at the end: pytest shows it if the test fails.

    Attributes:
      environ: with these variables, Google's clients use it.
      port: where it listens.
    """

    def __enter__(self) -> ObjectStore:
        self._log = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "tests.multiprocess.object_store", str(os.getpid())]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._log)
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_LIMIT_S)[0]:
            self._end()
            raise AssertionError(f"the emulator did not start within {START_LIMIT_S:g} s")
        port = self._process.stdout.readline().decode().strip()
        if not port:
            code = self._end()
            raise AssertionError(f"the emulator ended with {code}")
        self.port = int(port)
        self._url = url = f"http://127.0.0.1:{port}"
        self.environ = {
            "STORAGE_EMULATOR_HOST": url,  # for gcsfs
            "TENSORSTORE_GCS_HTTP_URL": url,  # for Orbax's arrays
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            # They look for credentials otherwise, in places that do not answer.
            "FSSPEC_GCS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> int:
        self._process.kill()
        self._process.communicate()
        print("the emulator's log:", *self._lines()[-SHOWN_LINES:], sep="\n", file=sys.stderr)
        self._log.close()
        return self._process.returncode

    def _lines(self) -> list[str]:
        # At a place of its own: the emulator shares this file's position.
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode().splitlines()

    def wait_for_log(self, text: str) -> None:
        """Waits until a line of the emulator's log ends with `text`."""
        end = time.monotonic() + ANSWER_LIMIT_S
        while not any(line.endswith(text) for line in self._lines()):
            assert time.monotonic() < end, text
            time.sleep(0.01)

    def get(self, name: str) -> bytes:
        """The content of an object."""
        place = urllib.parse.quote(name, safe="")
        url = f"{self._url}/storage/v1/b/{BUCKET}/o/{place}?alt=media"
        with urllib.request.urlopen(url, timeout=ANSWER_LIMIT_S) as found:
            return found.read()

    def put(self, name: str, content: bytes) -> None:
        """Writes an object."""
        url = f"{self._url}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={urllib.parse.quote(name, safe='')}"
        request = urllib.request.Request(url, content, {"Content-Type": "application/octet-stream"})
        urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S).close()

    def flip_byte(self, name: str) -> None:
        """Changes the first byte of an object."""
        content = self.get(name)
        self.put(name, bytes([content[0] ^ 1]) + content[1:])

    def refuse_all(self) -> None:
        """From now on no request is granted. An error that clients do not try again."""
        urllib.request.urlopen(f"{self._url}{REFUSE_ALL}", b"", timeout=ANSWER_LIMIT_S).close()


def main() -> None:
    """Serves. No request can hold up another one: none is handled before it has come as a whole, and no answer is sent
    while the storage is held."""
    from gcp_storage_emulator.handlers import buckets
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    log = logging.getLogger("requests")
    one_at_a_time = Lock()  # its memory is not made for several threads
    refuses_all = Event()

    class Handler(RequestHandler):
        timeout = STALLED_S
        status = 0

        def do_GET(self) -> None:
            self._answer(super().do_GET)

        def do_POST(self) -> None:
            self._answer(super().do_POST)

        def do_PUT(self) -> None:
            self._answer(super().do_PUT)

        def do_PATCH(self) -> None:
            self._answer(super().do_PATCH)

        def do_DELETE(self) -> None:
            self._answer(super().do_DELETE)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            self.status = int(code)

        def log_message(self, format: str, *args: object) -> None:
            log.info(format, *args)

        def _answer(self, handle: Callable[[], None]) -> None:
            began = time.monotonic()
            log.info("%s %s: comes", self.command, self.path)
            num_bytes = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(num_bytes)
            if len(body) < num_bytes:
                log.info("%s %s: broken off after %d bytes", self.command, self.path, len(body))
                return
            client, self.rfile, self.wfile = (self.rfile, self.wfile), io.BytesIO(body), io.BytesIO()
            try:
                with one_at_a_time:
                    self._handle(handle)
                answer = self.wfile.getvalue()
            finally:
                self.rfile, self.wfile = client
            self.wfile.write(answer)
            log.info("%s %s: %d after %.3f s", self.command, self.path, self.status, time.monotonic() - began)

        def _handle(self, handle: Callable[[], None]) -> None:
            if self.path == REFUSE_ALL:
                refuses_all.set()
                self.send_response(HTTPStatus.OK)
                self.end_headers()
            elif refuses_all.is_set():
                self.send_response(HTTPStatus.UNAUTHORIZED)
                self.end_headers()
                self.wfile.write(json.dumps({"error": {"code": 401, "message": REFUSAL}}).encode())
            elif "Transfer-Encoding" in self.headers:  # no client sends chunks, of which nobody knows how many come
                self.send_error(HTTPStatus.LENGTH_REQUIRED)
            elif "/moveTo/" in self.path:
                # The emulator knows no moves. Said in this way, the client copies and deletes instead.
                self.send_error(HTTPStatus.BAD_REQUEST)
            else:
                handle()

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # clients open dozens of connections at once; who finds no room waits for seconds

    class Memory(Storage):
        def _write_config_to_file(self) -> None:
            """Otherwise all it knows of all objects becomes text with each request that changes one."""

    storage = Memory(use_memory_fs=True)
    buckets.create_bucket(BUCKET, storage)
    server = Server(("127.0.0.1", 0), partial(Handler, storage))
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    main()
