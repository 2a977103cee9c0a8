"""Shared settings of the tests: JAX on CPU, with several devices for tests of programs that cross members."""

import atexit
import os
import shutil
import tempfile

import hypothesis

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

# Most of what a worker's start costs is compiling, and hundreds of workers of the tests compile the same programs.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="elastic-train-compiled-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


# A time limit for one example would make the outcome depend on how busy the machine is.
hypothesis.settings.register_profile("elastic_train", deadline=None)
hypothesis.settings.load_profile("elastic_train")


def pytest_configure() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 5)
