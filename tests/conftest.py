"""Shared settings of the tests: JAX on CPU, with several devices for tests of programs that cross members."""

import os

import hypothesis

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")


# A time limit for one example would make the outcome depend on how busy the machine is.
hypothesis.settings.register_profile("elastic_train", deadline=None)
hypothesis.settings.load_profile("elastic_train")


def pytest_configure() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 5)
