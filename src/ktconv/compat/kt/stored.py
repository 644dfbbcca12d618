"""Experts that a checkpoint has, by their place."""

from __future__ import annotations

from msgspec import Struct


class StoredExperts(Struct, frozen=True):
    """Layer `layer` of the checkpoint in directory `path`."""

    path: str
    layer: int
