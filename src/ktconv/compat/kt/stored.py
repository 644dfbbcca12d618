"""Experts that a checkpoint has, by their place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Layer `layer` of the checkpoint in directory `path`."""

    path: str
    layer: int
