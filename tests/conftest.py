"""What every test runs under, set before anything imports jax."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8"

import _platforms  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# `OUN_AS_ON=cuda` runs all tests on what GPUs would be given, computed by this CPU.
if "OUN_AS_ON" in os.environ:
    jax.lax.platform_dependent = _platforms.choose(os.environ["OUN_AS_ON"])

# Annotations of the package are checked at every call, in tests only.
jaxtyping.install_import_hook("optax_unitnorm", "beartype.beartype")

hypothesis.settings.register_profile(
    "project",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("OUN_EXAMPLES", "2")),
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,  # compiling is slow, and counted
        hypothesis.HealthCheck.data_too_large,
    ],
)
hypothesis.settings.load_profile("project")


def pytest_configure(config: pytest.Config) -> None:
    """Makes every warning an error; other packages' own are let through by name."""
    config.addinivalue_line("filterwarnings", "error")


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Device tests prove nothing on one device, so the count is not left to luck."""
    if jax.default_backend() == "cpu":
        assert jax.device_count() == 8, jax.devices()
