"""Google's object store, as far as checkpoints need it: an emulator that speaks its protocol, in a process of its own.

    python -m tests.multiprocess.object_store

prints its port, and serves until it is ended.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.parse
import urllib.request
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "bucket"


class ObjectStore:
    """An empty bucket named `BUCKET`, there for the time of a `with` block.

    Attributes:
      environ: with these variables, Google's clients use it.
    """

    def __enter__(self) -> ObjectStore:
        command = [sys.executable, "-m", "tests.multiprocess.object_store"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        assert port, f"the emulator ended with {self._process.wait()}"
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
        self._process.kill()
        self._process.communicate()

    def flip_byte(self, name: str) -> None:
        """Changes the first byte of an object."""
        place = urllib.parse.quote(name, safe="")
        with urllib.request.urlopen(f"{self._url}/storage/v1/b/{BUCKET}/o/{place}?alt=media", timeout=10) as found:
            content = bytearray(found.read())
        content[0] ^= 1
        there = f"{self._url}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={place}"
        request = urllib.request.Request(there, bytes(content), {"Content-Type": "application/octet-stream"})
        urllib.request.urlopen(request, timeout=10).close()


def main() -> None:
    """Serves."""
    from gcp_storage_emulator.handlers import buckets
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    one_at_a_time = Lock()  # its memory is not made for several threads

    class Handler(RequestHandler):
        def do_GET(self) -> None:
            with one_at_a_time:
                super().do_GET()

        def do_POST(self) -> None:
            with one_at_a_time:
                if "/moveTo/" in self.path:
                    # The emulator knows no moves. Said in this way, the client copies and deletes instead.
                    self.send_error(HTTPStatus.BAD_REQUEST)
                else:
                    super().do_POST()

        def do_PUT(self) -> None:
            with one_at_a_time:
                super().do_PUT()

        def do_DELETE(self) -> None:
            with one_at_a_time:
                super().do_DELETE()

    storage = Storage(use_memory_fs=True)
    buckets.create_bucket(BUCKET, storage)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, storage))
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
