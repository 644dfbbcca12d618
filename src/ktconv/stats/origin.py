"""Model and text that a file of statistics comes from, as metadata of safetensors files."""

from __future__ import annotations

import hashlib
import json

from msgspec import Struct
from msgspec.structs import asdict

from ktconv import __version__
from ktconv.source import Checkpoint, MoELayer
from ktconv.system.units import counted

FORMAT_VERSION = 1


class Sizes(Struct, frozen=True):
    """The routed experts of a layer: how many, and the inputs of gate and up, and of down."""

    experts: int
    hidden: int
    intermediate: int

    @property
    def words(self) -> str:
        """Words for errors."""
        return (
            f"{counted(self.experts, 'expert')} of hidden size {self.hidden} and intermediate size "
            f"{self.intermediate}"
        )

    @classmethod
    def of(cls, layer: MoELayer) -> Sizes:
        return cls(len(layer.experts), layer.hidden_size, layer.intermediate_size)


class Origin(Struct, frozen=True):
    """A run on a text: equal ones give equal statistics."""

    model: str
    source_sha256: str  # see the function of this name
    text: str  # its name
    text_sha256: str  # of what was read of it, as UTF-8 with "\n" as line ends
    tokens: int
    run: str  # identifies the state of all files, the tokens, the dtype and the versions
    router: str = ""  # numbers of it, see `router_sample`; empty: unknown

    def metadata(self, kind: str, version: int = FORMAT_VERSION) -> dict[str, str]:
        """The metadata of a file of this kind."""
        return {
            "format": kind,
            "format_version": str(version),
            "ktconv": __version__,
            **{name: str(value) for name, value in asdict(self).items()},
        }


def source_sha256(checkpoint: Checkpoint) -> str:
    """Identifies a checkpoint by config.json and the headers of its shards; copies have the same.
    It does not cover the values of weights."""
    parts = [[source.name, source.nbytes, source.sha256] for source in checkpoint.sources]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
