"""Digests of the recipe's own code, so that a worker can be told from one that runs something else."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import sys
from pathlib import Path


def code_digests(module_name: str) -> dict[str, str]:
    """Digest by file, for the module and what is imported from its directory or below; call it right after the import.

    Installed packages and elastic_train itself are left out: they have versions. Comments and layout do not count.

    Args:
      module_name: as in `sys.modules`.

    Returns:
      Paths relative to the module's directory, and 16 hexadecimal digits each.
    """
    file = getattr(sys.modules[module_name], "__file__", None)
    if file is None:  # typed at a prompt
        return {}
    root = os.path.dirname(os.path.realpath(file))
    inside = os.path.join(root, "")
    # A worker has imported more than a thousand files, and each start looks at all of them: so no Path for each.
    resolved = functools.cache(os.path.realpath)
    digests = {}
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if not source or not source.endswith(".py") or name.partition(".")[0] == "elastic_train":
            continue
        folder, file_name = os.path.split(source)
        path = os.path.realpath(source) if os.path.islink(source) else os.path.join(resolved(folder), file_name)
        if path.startswith(inside) and "site-packages" not in (parts := Path(path[len(inside) :])).parts:
            digests[parts.as_posix()] = _digest(Path(path))
    return digests


def _digest(path: Path) -> str:
    return hashlib.sha256(ast.dump(ast.parse(path.read_bytes())).encode()).hexdigest()[:16]
