"""Computing on this CPU what the package would have an accelerator compute."""

from collections.abc import Callable
from typing import Any


def choose(platform: str) -> Callable[..., Any]:
    """A stand-in for `jax.lax.platform_dependent` that takes another's branch."""

    def platform_dependent(
        *args: Any, default: Callable[..., Any], **branches: Callable[..., Any]
    ) -> Any:
        return branches.get(platform, default)(*args)

    return platform_dependent
