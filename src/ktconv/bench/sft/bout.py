"""One call, at which our methods and peers take turns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import cycle

import torch
from msgspec import Struct, to_builtins
from torch import Tensor

from ktconv import native
from ktconv.bench.cases import Layer, Session, different_experts
from ktconv.bench.limits import Limits, settle
from ktconv.bench.peers.base import PeerError
from ktconv.bench.peers.launch import PeerProcess
from ktconv.bench.peers.table import chosen, fit
from ktconv.bench.presets import Shape
from ktconv.bench.sft.inputs import Inputs
from ktconv.bench.sft.peers.request import Ready, Request
from ktconv.bench.sft.peers.table import PEERS
from ktconv.bench.sft.rows import Case, Checked, Row, judge
from ktconv.bench.sft.steps import Runner, Times, in_turn, turn
from ktconv.runtime import MoELayer
from ktconv.runtime.layers import Experts
from ktconv.system import machine
from ktconv.system.pool import Pool
from ktconv.system.units import counted
from ktconv.train.gradients import base_of, bounds, errors, expected, rounding_of
from ktconv.train.reference import Base, KernelRounding
from ktconv.train.step import Step

_COPIES = 4  # of its weights that a peer has while it is made


class Bout(Struct, frozen=True):
    session: Session
    layers: Sequence[tuple[Layer, Experts]]  # of one shape, each with its own method
    inputs: Inputs
    rank: int
    pool: Pool
    local: Sequence[float | None]  # share of weights on the NUMA nodes that read them, by layer

    @property
    def tokens(self) -> int:
        return len(self.inputs.call.x)

    @property
    def shape(self) -> Shape:
        return self.layers[0][0].shape


class Entrant(Struct, frozen=True):
    """Who takes part, and what the check of its first step has found."""

    case: Case
    runner: Runner
    checked: Checked


def rows_of(bout: Bout) -> Iterator[Row]:
    """The rows of all that take part."""
    with ExitStack() as stack:
        entrants = [*_ours(bout), *_peers(bout, stack)]
        before = _limits(bout)
        found = in_turn([one.runner for one in entrants], bout.session.request.effort)
        after = _limits(bout)
        pairs = torch.stack(bout.inputs.ids).ge(0).sum().item() / len(bout.inputs.ids)
        for one, times in zip(entrants, found, strict=True):
            if isinstance(times, PeerError):
                name = f"{one.case.engine} {one.case.method}"
                bout.session.notify(f"{name}: left out, {times}")
                continue
            isa = one.case.isa if one.case.isa in before else list(before)[-1]
            best = bout.session.meter.found[isa, bout.pool.threads]
            yield judge(one.case, times, pairs, one.checked, (before[isa], after[isa], best))


def _limits(bout: Bout) -> Mapping[str, Limits]:
    """Limits by level."""
    found = {}
    for isa in bout.session.request.isas:
        native.use_isa(isa)
        found[isa] = bout.session.meter.again(bout.pool)
    return found


def _case(bout: Bout, engine: str, method: str, isa: str, which: int | None = None) -> Case:
    layer = None if which is None else bout.layers[which][0]
    return Case(
        engine=engine,
        method=method,
        shape=bout.shape,
        routing=bout.session.request.routing.text,
        rank=bout.rank,
        tokens=bout.tokens,
        threads=bout.pool.threads,
        isa=isa,
        parts=1 if layer is None else layer.parts,
        layer=None if layer is None else layer.cases[0].layer,
        local_share=None if which is None else bout.local[which],
    )


# ---- ours ----


def _ours(bout: Bout) -> Iterator[Entrant]:
    for which, (layer, experts) in enumerate(bout.layers):
        judged = _Judge(experts, bout.inputs)
        for isa in bout.session.request.isas:
            native.use_isa(isa)
            step = Step(MoELayer(experts, bout.pool), bout.inputs.call)
            case = _case(bout, "ktconv", layer.method.key, isa, which)
            runner = OurRunner(step, isa, bout.inputs.ids)
            yield Entrant(case, runner, judged.check(step))


class _Judge:
    """The reference's gradients of a call."""

    def __init__(self, experts: Experts, inputs: Inputs) -> None:
        self._experts, self._call = experts, inputs.call
        how = rounding_of(experts)
        self._rounded = expected(self._call, self._base, how, experts.norm)
        same = how["rounding"] == "none"
        exact: KernelRounding = {**how, "rounding": "none"}
        self._exact = (
            self._rounded if same else expected(self._call, self._base, exact, experts.norm)
        )

    def _base(self, expert: int) -> Base:
        return base_of(self._experts.streams(int(self._experts.origins[expert])))

    def check(self, step: Step) -> Checked:
        step.forward(self._call.ids)
        step.backward()
        found = step.found()
        return Checked(
            errors(found, self._exact),
            errors(found, self._rounded),
            bounds(self._call),
            step.saved_bytes,
            step.scratch_bytes,
        )


# ---- peers ----


def _peers(bout: Bout, stack: ExitStack) -> Iterator[Entrant]:
    """Every installed peer for one of our methods. One that is missing or fails is left out with a
    message."""
    request, notify = bout.session.request, bout.session.notify
    if not request.peers:
        return
    for spec in chosen(PEERS.values(), {layer.method.key for layer, _ in bout.layers}, notify):
        if bout.pool.threads + spec.waiting > (cpus := machine.usable_cpus()):
            notify(
                f"{spec.name}: left out, its queue waits on a CPU of its own, so that "
                f"{counted(bout.pool.threads, 'thread', 'need')} "
                f"{bout.pool.threads + spec.waiting} "
                "CPUs and "
                f"there are {cpus}; give fewer --threads"
            )
            continue
        if not fit(spec.method, bout.shape, _COPIES):
            notify(f"{spec.name}: left out, too little memory is free")
            continue
        asked = Request(
            peer=spec.name,
            shape=bout.shape,
            routing=request.routing.text,
            tokens=bout.tokens,
            rank=bout.rank,
            threads=bout.pool.threads,
            seed=request.seed,
            different=different_experts(bout.shape),
        )
        notify(f"{bout.shape.name}, {spec.name}: {counted(bout.pool.threads, 'thread')}")
        try:
            runner = stack.enter_context(closing(PeerRunner(asked)))
        except PeerError as error:
            notify(f"{spec.name}: left out, {error}")
            continue
        engine, _, method = spec.name.partition(" ")
        ready = runner.ready
        checked = Checked(
            ready.errors, saved_bytes=ready.saved_bytes, scratch_bytes=ready.scratch_bytes
        )
        yield Entrant(_case(bout, engine, method, "own"), runner, checked)


# ---- who takes turns -------------------------------------------------------------------

_MODULE = "ktconv.bench.sft.peers.__main__"


class OurRunner:
    """The module that users train, at one instruction set level."""

    def __init__(self, step: Step, isa: str, ids: Sequence[Tensor]) -> None:
        self._step, self._isa, self._ids = step, isa, cycle(ids)

    def turn(self, steps: int) -> Times:
        native.use_isa(self._isa)
        times = turn(self._step, self._ids, steps)
        settle()
        return times


class PeerRunner:
    """A peer in a process of its own. Raises PeerError if it cannot be measured; close it in any
    case."""

    def __init__(self, request: Request) -> None:
        self._process = PeerProcess(_MODULE)
        try:
            self._process.send(json.dumps(to_builtins(request)))
            self.ready = Ready(**self._process.receive())
        except BaseException:
            self.close()
            raise

    def turn(self, steps: int) -> Times:
        self._process.send(str(steps))
        return Times(**self._process.receive())

    def close(self) -> None:
        self._process.close()
