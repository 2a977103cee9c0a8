"""The harness of the multiprocess tests serves here, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multiprocess"))
