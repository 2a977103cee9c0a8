"""What NCCL does once in each process, done before the members of a group would wait for it.

The first communicator of a process takes NCCL about half a second: it loads its kernels and looks at the machine. Those
after it take some hundredths. XLA makes one when members first exchange something, so all of them would wait for the
one that is new.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

SONAME = "libnccl.so.2"


def start_nccl() -> None:
    """Makes a communicator of this process alone on its first GPU, and lets it go. Says so if that fails, and goes on.

    The functions are NCCL's public ones, since its version 2.0.
    """
    library = _library()
    if library is None:
        print(f"elastic_train: no {SONAME} found to be started ahead of time", file=sys.stderr, flush=True)
        return
    communicator, device = ctypes.c_void_p(), (ctypes.c_int * 1)(0)
    code = library.ncclCommInitAll(ctypes.byref(communicator), 1, device) or library.ncclCommDestroy(communicator)
    if code != 0:
        library.ncclGetErrorString.restype = ctypes.c_char_p
        text = library.ncclGetErrorString(code).decode(errors="replace")
        print(f"elastic_train: NCCL could not be started ahead of time: {text}", file=sys.stderr, flush=True)


def _library() -> ctypes.CDLL | None:
    """The NCCL that XLA uses: what it has loaded, or else what is installed beside it.

    Never one that only the loader knows: XLA would then be given that instead of its own.
    """
    try:
        return ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        pass
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for place in found.submodule_search_locations or () if found else ():
        if (path := Path(place) / "lib" / SONAME).exists():
            return ctypes.CDLL(str(path))
    return None
