"""What a pass relies on: taps, sides, memory, and ends without threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.families import Weights, numbered, random_weights, simple_config, write_checkpoint
from helpers.streamed import experts_module, on_meta, routed, site_of

from ktconv.errors import CheckpointError, ResourceError
from ktconv.source import Checkpoint, open_checkpoint

pytestmark = pytest.mark.torch

EXPERTS, HIDDEN, INNER = 6, 128, 256
SOURCE = "model.layers.0.mlp.experts"


class Model:
    """One layer, written and in memory."""

    def __init__(self, directory: Path, torch: Any) -> None:
        self.weights = random_weights(HIDDEN, INNER, EXPERTS)
        config = simple_config(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
        self.path = write_checkpoint(directory, numbered(SOURCE, self.weights), config)
        self.module = experts_module(EXPERTS, HIDDEN, INNER).to(torch.bfloat16)
        self.fill(self.module, self.weights)

    @staticmethod
    def fill(module: Any, weights: Weights) -> None:
        import torch

        from ktconv.model.stored import stored_in

        own = stored_in(module)
        assert own is not None
        for expert in range(own.count):
            for projection, view in own.matrices(expert).items():
                view.copy_(torch.from_numpy(weights._asdict()[projection][expert].copy()))

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.path)

    def run(self, runner: Any, calls: list[Any], checkpoint: Checkpoint) -> list[Any]:
        import torch

        from ktconv.model.streamed.calls import ExpertLayer

        outputs = [torch.zeros_like(call.rows) for call in calls]
        layer = ExpertLayer.at(0, on_meta(site_of(self.module)), checkpoint.layers[0])
        with torch.inference_mode():
            runner.run(layer, calls, outputs)
        return outputs


@pytest.fixture
def model(tmp_path: Path, torch: Any) -> Model:
    return Model(tmp_path / "model", torch)


def calls_of(sizes: tuple[int, ...], sides: int = 1) -> list[Any]:
    """Windows of so many tokens; the last expert has none."""
    import torch

    from ktconv.model.streamed.calls import Call

    found = []
    for window, tokens in enumerate(sizes):
        for side in range(sides):
            seed = 2 * window + side
            rows = torch.randn((tokens, HIDDEN), generator=torch.Generator().manual_seed(seed))
            ids, weights = routed(tokens, EXPERTS, 2, seed)
            rows, weights = rows.to(torch.bfloat16), weights.to(torch.bfloat16)
            found.append(Call(side, window, rows, ids, weights))
    return found


class Watching:
    """A tap that keeps what it sees."""

    def __init__(self, wants_inputs: bool = True) -> None:
        self.wants_inputs = wants_inputs
        self.events: list[tuple[Any, ...]] = []
        self.inputs_of: dict[int, tuple[Any, Any]] = {}
        self.weights_of: dict[int, Any] = {}
        self.restored: Mapping[str, Any] = {}

    def chosen(self, layer: int, window: int, ids: Any, weights: Any) -> None:
        self.events.append(("chosen", layer, window, len(ids)))

    def inputs(self, layer: int, expert: int, rows: Any, inner: Any, weights: Any) -> None:
        self.events.append(("inputs", layer, expert, len(rows)))
        self.inputs_of[expert] = rows.clone(), inner.clone()
        self.weights_of[expert] = weights.clone()

    def layer_done(self, layer: int) -> None:
        self.events.append(("done", layer))

    def state(self) -> Mapping[str, Any]:
        return {"events": np.array([len(self.events)])}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.restored = state


@pytest.mark.parametrize("rows_at_once", [5, 1024])
def test_taps(model: Model, rows_at_once: int, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktconv.model.streamed import experts
    from ktconv.model.streamed.experts import SourceExperts

    monkeypatch.setattr(experts, "ROWS_AT_ONCE", rows_at_once)
    checkpoint, calls = model.checkpoint, calls_of((33, 1), sides=2)
    tap, other = Watching(), Watching(wants_inputs=False)
    found = model.run(
        SourceExperts(checkpoint, torch.bfloat16, taps=[tap, other]), calls, checkpoint
    )
    plain = model.run(SourceExperts(checkpoint, torch.bfloat16), calls, checkpoint)
    assert all(map(torch.equal, found, plain))  # who watches changes nothing
    mine = [call for call in calls if call.side == 0]
    counts = torch.bincount(torch.cat([call.ids.flatten() for call in mine]), minlength=EXPERTS)
    assert tap.events == [
        ("chosen", 0, 0, 33),
        ("chosen", 0, 1, 1),
        *(("inputs", 0, e, int(n)) for e, n in enumerate(counts) if n),
        ("done", 0),
    ]
    assert other.events == [tap.events[0], tap.events[1], tap.events[-1]]
    for expert, (rows, inner) in tap.inputs_of.items():
        gate_up = torch.nn.functional.linear(rows, model.module.gate_up_proj[expert])
        gate, up = gate_up.chunk(2, dim=-1)
        assert torch.equal(inner, torch.nn.functional.silu(gate) * up)
        of_router = [call.weights[call.ids == expert] for call in mine]
        assert torch.equal(tap.weights_of[expert].sort()[0], torch.cat(of_router).sort()[0])


def test_state_of_taps(model: Model, torch: Any) -> None:
    from ktconv.model.streamed.experts import SourceExperts

    first, second = Watching(), Watching()
    second.events = [()] * 3
    state = SourceExperts(model.checkpoint, torch.bfloat16, taps=[first, second]).state()
    taps = [Watching(), Watching()]
    SourceExperts(model.checkpoint, torch.bfloat16, taps=taps).restore(state)
    assert [int(tap.restored["events"][0]) for tap in taps] == [0, 3]


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("threads", [1, 3])
def test_converted_side(model: Model, threads: int, memory: int | None, torch: Any) -> None:
    """Some experts of side 1 have other matrices, the rest are the source's; whatever the memory
    and the threads."""
    from ktconv.model.streamed.experts import SourceExperts

    checkpoint, calls = model.checkpoint, calls_of((33, 2), sides=2)
    others = random_weights(HIDDEN, INNER, EXPERTS, seed=1)
    here = (0, 2, 3)
    mixed = experts_module(EXPERTS, HIDDEN, INNER).to(torch.bfloat16)
    stacks = [stack.copy() for stack in model.weights]
    for stack, other in zip(stacks, others, strict=True):
        stack[list(here)] = other[list(here)]
    model.fill(mixed, Weights(*stacks))

    def converted(layer: int, expert: int) -> Mapping[Any, Any] | None:
        assert layer == 0
        if expert not in here:
            return None
        return {name: stack[expert] for name, stack in others._asdict().items()}

    read: list[int] = []
    runner = SourceExperts(
        checkpoint, torch.bfloat16, threads=threads, memory=memory, read=read.append,
        converted=converted,
    )  # fmt: skip
    found = model.run(runner, calls, checkpoint)
    for call, output in zip(calls, found, strict=True):
        module = mixed if call.side else model.module
        assert torch.equal(output, module(call.rows, call.ids, call.weights))
    size = 3 * 2 * HIDDEN * INNER
    assert read == [size] * (EXPERTS - 1)  # once for both sides; nobody chose the last one
    # Where side 0 has no tokens, an expert that is converted is not read.
    read.clear()
    model.run(runner, [call for call in calls if call.side], checkpoint)
    assert sum(read) == size * (EXPERTS - 1 - len(here))


def test_no_tokens(model: Model, torch: Any) -> None:
    """Calls without any choice, and no calls, read nothing."""
    from ktconv.model.streamed.calls import Call
    from ktconv.model.streamed.experts import SourceExperts

    checkpoint = model.checkpoint
    read: list[int] = []
    runner = SourceExperts(checkpoint, torch.bfloat16, read=read.append)
    rows = torch.ones((3, HIDDEN), dtype=torch.bfloat16)
    none = Call(0, 0, rows, torch.full((3, 2), -1), torch.ones((3, 2)))
    (output,) = model.run(runner, [none], checkpoint)
    assert not output.any()
    assert model.run(runner, [], checkpoint) == []
    assert read == []


def place(checkpoint: Checkpoint, expert: int) -> tuple[Path, int]:
    matrix = checkpoint.layers[0].experts[expert]["up"]
    return matrix.tensor.file, matrix.extent[0]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_weight_that_is_no_number(model: Model, threads: int, torch: Any) -> None:
    from ktconv.model.streamed.experts import SourceExperts

    checkpoint = model.checkpoint
    file, offset = place(checkpoint, 3)
    with file.open("r+b") as opened:
        opened.seek(offset + 2 * (5 * HIDDEN + 7))
        opened.write(b"\xc0\x7f")
    checkpoint = model.checkpoint
    threads_before = set(threading.enumerate())
    runner = SourceExperts(checkpoint, torch.bfloat16, threads=threads)
    with pytest.raises(
        CheckpointError, match=rf"{SOURCE}\.3\.up_proj.*NaN or an infinity at \[5, 7\]"
    ):
        model.run(runner, calls_of((33,)), checkpoint)
    assert set(threading.enumerate()) <= threads_before


def test_a_shard_cut_short(model: Model, torch: Any) -> None:
    """While the pass runs."""
    from ktconv.model.streamed.experts import SourceExperts

    checkpoint = model.checkpoint
    file, offset = place(checkpoint, 3)
    threads_before = set(threading.enumerate())
    runner = SourceExperts(checkpoint, torch.bfloat16, threads=2)
    with file.open("r+b") as opened:
        opened.truncate(offset + 100)
    with pytest.raises((CheckpointError, ResourceError), match=file.name):
        model.run(runner, calls_of((33,)), checkpoint)
    assert set(threading.enumerate()) <= threads_before


def test_an_interrupt(model: Model, torch: Any) -> None:
    """In the thread that computes, while others decode."""
    from ktconv.model.streamed.experts import SourceExperts

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    checkpoint, threads_before = model.checkpoint, set(threading.enumerate())
    runner = SourceExperts(checkpoint, torch.bfloat16, threads=4, read=interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.run(runner, calls_of((33,)), checkpoint)
    assert set(threading.enumerate()) <= threads_before


def test_memory(model: Model, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more decoded experts at a time than fit, and never more than threads can use."""
    from ktconv.model.streamed import experts
    from ktconv.model.streamed.experts import SourceExperts, expert_memory
    from ktconv.model.streamed.filling import ExpertFiller

    made: list[int] = []
    own = ExpertFiller

    def filler(*arguments: Any) -> Any:
        made.append(1)
        return own(*arguments)

    monkeypatch.setattr(experts, "ExpertFiller", filler)
    checkpoint = model.checkpoint
    each = expert_memory(checkpoint.layers[0], torch.bfloat16)
    assert each >= 3 * 2 * HIDDEN * INNER
    for memory, expected in ((1, 1), (2 * each, 2), (10 * each, 4), (None, 4)):
        made.clear()
        runner = SourceExperts(checkpoint, torch.bfloat16, threads=3, memory=memory)
        model.run(runner, calls_of((33,)), checkpoint)
        assert len(made) == expected


def test_ahead(model: Model, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice is for each chosen expert once, then for the next layer's first ones, once."""
    from ktconv.model.streamed import ahead
    from ktconv.model.streamed.experts import SourceExperts

    spans: list[Any] = []
    monkeypatch.setattr(ahead, "advise", spans.extend)
    monkeypatch.setattr(ahead, "NEXT_LAYER_BYTES", 1)
    checkpoint = model.checkpoint
    runner = SourceExperts(checkpoint, torch.bfloat16, threads=2)
    runner.ahead(checkpoint.layers[0])
    model.run(runner, calls_of((33,)), checkpoint)
    advised = [(span.file, span.offset) for span in spans]
    experts = [one.values() for one in checkpoint.layers[0].experts]
    expected = [
        (matrix.tensor.file, matrix.extent[0]) for one in experts[: EXPERTS - 1] for matrix in one
    ]
    assert advised[: len(expected)] == expected
    assert advised[len(expected) :] == expected[: len(advised) - len(expected)]
    assert len(advised) - len(expected) in (3, 6)  # one expert, and what `upto` begins
    spans.clear()
    model.run(runner, calls_of((33,)), checkpoint)
    assert len(spans) == len(expected)
