"""One test for many values, where a test for each would take longer to count than to run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def each(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """Like pytest.mark.parametrize, within one test: a failure names the values that it came with.
    Fixtures are those of the whole test, so a test undoes what it changes in them."""
    arguments = [name.strip() for name in names.split(",")]
    rows = [value if len(arguments) > 1 else (value,) for value in values]
    if not rows or any(len(row) != len(arguments) for row in rows):
        raise ValueError(f"no values of {names}")

    def looped(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for row in rows:
                given = dict(zip(arguments, row, strict=True))
                try:
                    test(**fixtures, **given)
                except Exception as error:
                    shown = ", ".join(f"{name} = {value!r}" for name, value in given.items())
                    raise AssertionError(f"with {shown}: {error}") from error

        signature = inspect.signature(test)
        left = [one for name, one in signature.parameters.items() if name not in arguments]
        if len(left) + len(arguments) != len(signature.parameters):
            raise ValueError(f"{test.__name__} takes no {names}")
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return looped
