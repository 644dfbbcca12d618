"""Runs that end after their first unit."""

from __future__ import annotations

from ktconv.conversion.pipeline import Observer


class StopsAfterOneUnit(Observer):
    """In the place of the observer of a run, which then ends as by Ctrl-C."""

    def unit_finished(self, key: str) -> None:
        raise KeyboardInterrupt
