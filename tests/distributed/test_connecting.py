"""What is said of a Ray cluster that refuses this process. Ray itself is not needed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ktconv.distributed.cluster import AUTO, _refused
from ktconv.errors import ResourceError, UsageError

pytestmark = pytest.mark.slow

ADDRESS = "10.0.0.1:6379"
SECRET = "0123456789abcdef"


def chained(*errors: Exception) -> Exception:
    """The first one, which follows from the next, and so on: as Ray raises them."""
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


class AuthenticationError(Exception):
    """Ray's class has this name."""


@pytest.mark.parametrize("address", [ADDRESS, AUTO])
@pytest.mark.parametrize("cause", [
    RuntimeError(f"RPC error: InvalidAuthToken: token {SECRET} is missing or incorrect"),
    RuntimeError("Failed to get cluster ID from GCS server: Unauthenticated"),
    AuthenticationError(f"{SECRET} is refused"),
])  # fmt: skip
def test_a_token_is_asked_for(address: str, cause: Exception) -> None:
    outer = ConnectionError(f"Failed to connect to Ray cluster at {address}")
    found = _refused(address, chained(outer, RuntimeError("Failed to connect to GCS"), cause))
    assert isinstance(found, ResourceError)
    assert "wants a token" in str(found)
    assert "auto" not in str(found)
    assert found.hint is not None
    assert "RAY_AUTH_MODE=token" in found.hint
    assert SECRET not in str(found) + found.hint


def test_a_token_that_is_not_there() -> None:
    error = RuntimeError("Token authentication is enabled but no authentication token was found.")
    assert "wants a token" in str(_refused(ADDRESS, error))


def test_other_reasons_are_not_taken_for_a_token() -> None:
    outer = ConnectionError(f"Failed to connect to Ray cluster at {ADDRESS}")
    found = _refused(ADDRESS, chained(outer, RuntimeError("Version mismatch")))
    assert "token" not in f"{found} {found.hint}"
    assert isinstance(_refused(AUTO, ConnectionError("no cluster")), UsageError)
