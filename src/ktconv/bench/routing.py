"""Routings: the experts that tokens go to.

balanced      each token has top-k experts of its own, drawn without replacement, fresh every
              iteration, so that weights come from memory and not from a cache
concentrated  all tokens share the same top-k experts (they still change every iteration)
zipf:S        experts drawn with probability 1 / rank^S, distinct within a token
trace:FILE    recorded ids, [tokens, top-k], from a .safetensors or .npz file
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ktconv.errors import UsageError
from ktconv.system.arrays import I64, Array
from ktconv.system.units import counted

KINDS = "balanced, concentrated, zipf:S, trace:FILE"


class Routing(Struct, frozen=True):
    """The way to draw ids; `text` is what the user wrote."""

    text: str
    kind: str
    exponent: float = 0.0
    trace: I64 | None = None

    def iterations(self, tokens: int, experts: int, top_k: int, seed: int) -> Iterator[I64]:
        """Ids [tokens, top_k] without end."""
        rng = np.random.default_rng([seed, tokens, experts, top_k])
        start = 0
        while True:
            if self.trace is not None:
                rows = np.arange(start, start + tokens) % len(self.trace)
                start = int(rows[-1]) + 1
                yield np.ascontiguousarray(self.trace[rows])
            elif self.kind == "concentrated":
                yield np.tile(_draw(rng, 1, experts, top_k, 0.0), (tokens, 1))
            else:
                yield _draw(rng, tokens, experts, top_k, self.exponent)


def _draw(rng: np.random.Generator, tokens: int, experts: int, top_k: int, s: float) -> I64:
    """Distinct experts per token; the Gumbel trick makes keys whose order is a weighted draw."""
    keys = rng.gumbel(size=(tokens, experts))
    if s:
        keys -= s * np.log(np.arange(1, experts + 1))
    if top_k == experts:
        return np.argsort(-keys, axis=1)
    return np.ascontiguousarray(np.argpartition(-keys, top_k, axis=1)[:, :top_k])


def parse_routing(text: str) -> Routing:
    """Raises UsageError for anything that is not one of KINDS."""
    kind, _, argument = text.partition(":")
    kind = kind.lower()
    if kind in ("balanced", "concentrated") and not argument:
        return Routing(kind, kind)
    if kind == "zipf":
        try:
            exponent = float(argument)
        except ValueError:
            exponent = -1.0
        if 0.0 < exponent <= 10.0:
            return Routing(text, kind, exponent)
        raise UsageError(f"--routing {text!r} needs an exponent", "write it like zipf:1.1")
    if kind == "trace" and argument:
        return Routing(text, kind, trace=_read_trace(Path(argument)))
    raise UsageError(f"--routing {text!r} is not known", f"choose from: {KINDS}")


def check_trace(routing: Routing, experts: int, top_k: int, *, of_model: bool = False) -> None:
    """A recorded trace must fit the layer: ids in range, as many per token as its top-k.

    `of_model`: the layer is a converted model's, not one of --shape.
    """
    if routing.trace is None:
        return
    if routing.trace.shape[1] != top_k:
        recorded = routing.trace.shape[1]
        raise UsageError(
            f"the trace has {counted(recorded, 'expert')} per token, the "
            f"{'model' if of_model else 'shape'} {top_k}",
            f"give --top-k {recorded}" if of_model else "give a --shape with that top-k",
        )
    worst = int(routing.trace.max())
    if worst >= experts:
        token = int(np.argwhere(routing.trace == worst)[0][0])
        raise UsageError(
            f"the trace sends token {token} to expert {worst}, but there are {experts}",
            "give the trace of this --model"
            if of_model
            else "give the --shape (and --experts) of the model that was traced",
        )


def only_here(routing: Routing, here: I64) -> Routing:
    """A recorded trace with -1 for experts that are not in `here`; other routings unchanged."""
    if routing.trace is None:
        return routing
    return replace(routing, trace=np.where(np.isin(routing.trace, here), routing.trace, -1))


def check_replay(routing: Routing, tokens: int) -> None:
    """UsageError if none of the first `tokens` tokens of a trace, which a row replays, has an
    expert in this layer."""
    if routing.trace is not None and not (routing.trace[:tokens] >= 0).any():
        raise UsageError(
            f"the first {counted(min(tokens, len(routing.trace)), 'token')} of the trace go to "
            "no expert",
            "give more --tokens, or a trace of experts that are here",
        )


def _read_trace(path: Path) -> I64:
    arrays = _load_arrays(path)
    integer = {
        name: array
        for name, array in arrays.items()
        if array.dtype.kind in "iu" and array.ndim >= 2
    }
    if len(integer) != 1 and "ids" not in integer:
        raise UsageError(
            f"{path} has {len(integer)} arrays that could be expert ids",
            "store one integer array [tokens, top-k], or name it ids",
        )
    found = integer["ids"] if "ids" in integer else next(iter(integer.values()))
    if not found.size or found.min() < -1 or found.max() > np.iinfo(np.int64).max:
        raise UsageError(
            f"{path} has no usable expert ids: none, or some below -1 or too large",
            "store numbers of experts from 0 on, -1 for one that is not here",
        )
    if found.max() < 0:
        raise UsageError(
            f"{path} contains only -1: no token goes to an expert",
            "give a trace of experts that are here",
        )
    ids = found.reshape(-1, found.shape[-1]).astype(np.int64)
    _refuse_twice(ids, path)
    return ids


def _refuse_twice(ids: I64, path: Path) -> None:
    """UsageError if a token has the same expert twice, which no router does."""
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, column = (int(n) for n in np.argwhere(twice)[0])
        raise UsageError(
            f"{path} sends token {token} to expert {ordered[token, column]} twice",
            "store the experts of each token once",
        )


def _load_arrays(path: Path) -> dict[str, Array]:
    """All integer arrays of a file. Others are not read: NumPy lacks some types of safetensors."""
    if not path.is_file():
        raise UsageError(f"there is no trace file {path}")
    if path.suffix not in (".safetensors", ".npz"):
        raise UsageError(f"{path} is not a trace file", "give a .safetensors or .npz file")
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, framework="numpy") as file:
                return {
                    name: file.get_tensor(name)
                    for name in file.keys()  # noqa: SIM118  # it is no mapping
                    if file.get_slice(name).get_dtype()[0] in "IU"
                }
        with np.load(path, allow_pickle=False) as loaded:
            return {name: np.asarray(loaded[name]) for name in loaded if _is_integer(loaded, name)}
    except Exception:  # each library has its own for a damaged file
        raise UsageError(f"{path} is damaged or no {path.suffix} file") from None


def _is_integer(archive: Any, name: str) -> bool:
    """Whether an array of an .npz file has integers, according to its header."""
    with archive.zip.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        return version not in read or read[version](file)[2].kind in "iu"
