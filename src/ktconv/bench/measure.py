"""Timing one layer: its results are checked first, then iterations run on fresh routings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
from msgspec import Struct

from ktconv.bench.limits import own_seconds
from ktconv.bench.rows import Errors, Sample
from ktconv.errors import VerificationError
from ktconv.formats.decode import bf16_to_f32, f32_to_bf16
from ktconv.native import Pool, isa
from ktconv.runtime.layers import KERNEL_BOUND, Experts
from ktconv.system.arrays import Array

WARM_UP = 2
_LEAST_ITERATIONS, _PATIENCE = 5, 10  # the latter: times --seconds before giving up on more
_MOST_ROUTINGS, _KEPT_IDS = 512, 1 << 21  # drawn before timing starts
_ALL_CHECKED, _LEAST_CHECKED = 16, 3  # so many tokens are all checked; of more, at least so many
_CHECKED_ELEMENTS = 1 << 30  # of the experts that larger batches are checked with: 10 s to unpack
_PASS = 2048  # tokens that the kernels compute at a time
# Of one token: in narrow layers a single int8 activation that is rounded differently matters.
_TOKEN_BOUND = 2 * KERNEL_BOUND
_UNWRITTEN = 0xFFFF  # NaN in y before a call, so that what is not written shows
_TICKS = 2  # of /proc/stat: less is rounding


class Effort(Struct, frozen=True):
    """Time that a row is measured: `iterations` if given, else about `seconds`."""

    seconds: float = 0.5
    iterations: int | None = None


class Batch(Struct, frozen=True):
    """Inputs of one row: tokens, and where they go in each iteration."""

    x: Array
    weights: Array
    ids: list[Array]

    @property
    def checked(self) -> int:
        """Index of the first routing with an expert: a trace can begin with -1 only."""
        return next((i for i, ids in enumerate(self.ids) if (ids >= 0).any()), 0)


def make_batch(
    ids: Iterator[Array], tokens: int, hidden: int, top_k: int, seed: int, effort: Effort
) -> Batch:
    rng = np.random.default_rng(seed)
    x = f32_to_bf16(rng.standard_normal((tokens, hidden), np.float32))
    weights = rng.random((tokens, top_k), np.float32)
    weights /= weights.sum(axis=1, keepdims=True)
    return Batch(x, weights, list(islice(ids, kept_routings(tokens, top_k, effort))))


def kept_routings(tokens: int, top_k: int, effort: Effort) -> int:
    """Number of routings that are drawn before timing starts; iterations beyond them repeat."""
    count = max(1, min(_MOST_ROUTINGS, _KEPT_IDS // (tokens * top_k)))
    return min(count, WARM_UP + effort.iterations) if effort.iterations else count


def batch_bytes(tokens: int, hidden: int, top_k: int, effort: Effort) -> int:
    """Memory of a batch and of its check at most: x is drawn as float32 and copied in rounding;
    later there are two of x and y, and ids and weights once more while pieces are checked."""
    kept = kept_routings(tokens, top_k, effort)
    return tokens * (16 * hidden + top_k * (8 * kept + 8 + 3 * 4))


class Reference:
    """y of some tokens of a batch (see checked_tokens), computed in float32."""

    def __init__(self, experts: Experts, batch: Batch) -> None:
        self._experts = experts
        self.ids = batch.ids[batch.checked]
        origins = np.where(self.ids >= 0, experts.origins[self.ids], -1)
        size = experts.activation.products * experts.hidden * experts.intermediate
        self.tokens = checked_tokens(origins, _CHECKED_ELEMENTS // size)
        self._origins = origins[self.tokens]
        self._inputs = batch.x[self.tokens], self.ids[self.tokens], batch.weights[self.tokens]

    @property
    def rounded(self) -> Array:
        """Result with activations rounded as by the kernels, which leaves almost no difference."""
        return self._both[0]

    @property
    def packed(self) -> Array:
        """On the values of the packed weights, with unrounded activations."""
        return self._both[1]

    @cached_property
    def _both(self) -> tuple[Array, Array]:
        """Both results, origin by origin, so that each is unpacked once."""
        x, ids, weights = self._inputs
        rounded, packed = np.zeros(x.shape, np.float32), np.zeros(x.shape, np.float32)
        for origin in np.unique(self._origins[self._origins >= 0]):
            once = lru_cache(1)(self._experts.loaded)
            arguments = (x, np.where(self._origins == origin, ids, -1), weights, once)
            rounded += self._experts.reference(*arguments, rounded=True)
            packed += self._experts.reference(*arguments)
        return rounded, packed

    @cached_property
    def source(self) -> Array | None:
        """On the weights before quantization, where they are known."""
        if self._experts.source is None:
            return None
        return self._experts.reference(*self._inputs, self._experts.source)


def checked_tokens(origins: Array, most: int) -> list[int]:
    """Tokens to compare with float32, of origins [M, K] (-1: none) of the experts they go to.

    All of a small batch. Of a larger one the first and last, those around the kernels' first
    border between passes, and some in between, as far as together they need at most `most`
    origins; three tokens in any case.
    """
    last = len(origins) - 1
    if last < _ALL_CHECKED:
        return list(range(last + 1))
    used = np.flatnonzero((origins >= 0).any(axis=1))
    spread = [int(used[(len(used) - 1) * i // (_ALL_CHECKED - 1)]) for i in range(_ALL_CHECKED)]
    border = [token for token in (_PASS - 1, _PASS) if token <= last]
    middle = spread[_ALL_CHECKED // 2]
    chosen: set[int] = set()
    needed: set[int] = set()
    for token in (0, last, spread[0], spread[-1], middle, *border, *spread):
        wanted = needed | {int(origin) for origin in origins[token] if origin >= 0}
        if len(wanted) <= most or len(chosen) < _LEAST_CHECKED:
            chosen.add(token)
            needed = wanted
    return sorted(chosen)


def check(experts: Experts, batch: Batch, reference: Reference, pool: Pool) -> Errors:
    """Raises VerificationError if the kernel is wrong; it is not timed then.

    All of y must be written, finite and independent of which other tokens are in the batch; some
    tokens are compared with float32.
    """
    y = np.full_like(batch.x, _UNWRITTEN)
    tokens, top_k = reference.ids.shape
    scratch = experts.layer.scratch(tokens, top_k, pool)
    experts.layer.call(pool, batch.x, reference.ids, batch.weights, y, scratch)()
    _expect_finite(experts, y)
    apart = _in_pieces(experts, batch, reference, pool)
    checked = bf16_to_f32(y[reference.tokens])
    for result in (checked, bf16_to_f32(apart[reference.tokens])):
        expect_right(experts, result, reference.rounded)
    expect_same(experts, y, apart)
    source = None if reference.source is None else relative_error(checked, reference.source)
    kernel = relative_error(checked, reference.rounded)
    return Errors(relative_error(checked, reference.packed), source, kernel)


def _in_pieces(experts: Experts, batch: Batch, reference: Reference, pool: Pool) -> Array:
    """y once more: tokens in reverse, in two batches of different sizes."""
    y = np.empty_like(batch.x)
    order = np.arange(len(y))[::-1]
    cut = len(y) // 3
    for piece in filter(len, (order[:cut], order[cut:])):
        y[piece] = experts.forward(batch.x[piece], reference.ids[piece], batch.weights[piece], pool)
    return y


def _expect_finite(experts: Experts, y: Array) -> None:
    for start in range(0, len(y), _PASS):
        bad = (y[start : start + _PASS] & 0x7F80) == 0x7F80
        if bad.any():
            token = start + int(np.flatnonzero(bad.any(axis=1))[0])
            raise _wrong(experts, f"y of token {token} of {len(y)} is not finite, or not written")


def expect_right(experts: Experts, result: Array, expected: Array) -> None:
    """VerificationError if all tokens together, or any one of them, differ too much."""
    error, worst = relative_error(result, expected), float(_token_errors(result, expected).max())
    if not error <= KERNEL_BOUND:
        what, bound = f"relative error {error:.2g}", KERNEL_BOUND
    elif not worst <= _TOKEN_BOUND:
        what, bound = f"relative error {worst:.2g} of a token", _TOKEN_BOUND
    else:
        return
    raise _wrong(experts, f"{what} against float32, at most {bound:g} is right")


def expect_same(experts: Experts, y: Array, apart: Array) -> None:
    """VerificationError if the results differ in any bit, or where ktconv.h does not promise equal
    bits, by more than twice the error bound."""
    exact = isa() != "amx" or experts.format.activations != "bf16"
    for start in range(0, len(y), _PASS):
        one, other = y[start : start + _PASS], apart[start : start + _PASS]
        if exact:
            bad = (one != other).any(axis=1)
        else:
            bad = ~(_token_errors(bf16_to_f32(one), bf16_to_f32(other)) <= _TOKEN_BOUND)
        if bad.any():
            token = start + int(np.flatnonzero(bad)[0])
            what = f"token {token} of {len(y)} has another result with other tokens in the batch"
            raise _wrong(experts, what)


def _wrong(experts: Experts, what: str) -> VerificationError:
    return VerificationError(
        f"the {experts.format.key} kernel is wrong: {what}",
        "please report this with the output of ktconv doctor",
    )


def _token_errors(got: Array, expected: Array) -> Array:
    sizes = np.maximum(np.linalg.norm(expected, axis=1), 1e-30)
    errors: Array = np.linalg.norm(got - expected, axis=1) / sizes
    return errors


def relative_error(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got - expected)) / max(float(np.linalg.norm(expected)), 1e-30)


def sample(experts: Experts, batch: Batch, pool: Pool, effort: Effort) -> Sample:
    """Iterations in turn on the batch's ids. Only the C call is timed."""
    y = np.full_like(batch.x, _UNWRITTEN)
    tokens, top_k = batch.weights.shape
    scratch = experts.layer.scratch(tokens, top_k, pool)
    calls = [experts.layer.call(pool, batch.x, ids, batch.weights, y, scratch) for ids in batch.ids]
    for call in calls[:WARM_UP] if effort.iterations is None else calls[:1]:
        call()
    before = _clocks()
    times = timed(calls, effort)
    taken = share_of_others(before, _clocks())
    _expect_finite(experts, y)
    pairs, distinct = routed(batch, len(times))
    return Sample(times, pairs, distinct, taken)


def timed(calls: Sequence[Callable[[], None]], effort: Effort) -> tuple[float, ...]:
    """Seconds of each iteration; call i of n is the one with the batch's ids i."""
    times: list[float] = []
    start = time.perf_counter()
    while not _enough(len(times), time.perf_counter() - start, effort):
        call = calls[_turn(len(times), len(calls))]
        before = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - before) / 1e9)
    return tuple(times)


def routed(batch: Batch, iterations: int) -> tuple[float, float]:
    """Means over the iterations of `timed`: pairs of token and expert, distinct experts."""
    used = [batch.ids[_turn(i, len(batch.ids))] for i in range(min(iterations, len(batch.ids)))]
    pairs = float(np.mean([np.count_nonzero(ids >= 0) for ids in used]))
    distinct = float(np.mean([len(np.unique(ids[ids >= 0])) for ids in used]))
    return pairs, distinct


def _turn(iteration: int, routings: int) -> int:
    return (iteration + WARM_UP) % routings


def _enough(count: int, elapsed: float, effort: Effort) -> bool:
    if effort.iterations:
        return count >= effort.iterations
    if elapsed < effort.seconds or not count:
        return False
    return count >= _LEAST_ITERATIONS or elapsed >= _PATIENCE * effort.seconds


def _clocks() -> tuple[float, float, float]:
    """Seconds that passed, that all CPUs worked, and that they worked for this process."""
    return time.perf_counter(), _busy_seconds(), own_seconds()


def share_of_others(before: tuple[float, ...], after: tuple[float, ...]) -> float:
    """Share of the time of all CPUs that other processes and virtual machines used between two
    readings of `_clocks`; 0 if the system does not report it, or it is too short."""
    elapsed, busy, own = (b - a for a, b in zip(before, after, strict=True))
    if busy - own <= _TICKS / os.sysconf("SC_CLK_TCK"):
        return 0.0
    return (busy - own) / max(elapsed * (os.cpu_count() or 1), 1e-9)


def _busy_seconds() -> float:
    """Busy seconds of all CPUs, including what the hypervisor gave to other machines."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, irq, soft, steal = (int(field) for field in fields[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
