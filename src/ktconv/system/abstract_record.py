"""Base of records that have abstract methods."""

from __future__ import annotations

from abc import ABCMeta

from msgspec import Struct, StructMeta


class _AbstractRecordMeta(StructMeta, ABCMeta):
    """Both kinds of classes at once."""


class AbstractRecord(Struct, metaclass=_AbstractRecordMeta, frozen=True):
    """A Struct that cannot be made while methods of it are abstract."""
