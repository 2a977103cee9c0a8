"""Shared settings of the tests: JAX on CPU, with several devices for tests of programs that cross members."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")


def pytest_configure() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 5)
