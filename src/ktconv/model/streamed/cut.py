"""A model's own forward pass, run up to one of its layers and stopped there.

All other layers answer with what is recorded: whatever the layer before the wanted one returned.
So masks, rotary embeddings and whatever else is between layers is the model's own code. `check`
proves that a layer depends on nothing but the output of the layer before it, and the text.

A run is a greenlet, which stops in the middle of a layer where its experts are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from torch import Tensor, nn

from ktconv.errors import CheckpointError
from ktconv.model.forms import packed_class
from ktconv.model.load import running
from ktconv.model.module import PackedExperts
from ktconv.model.streamed.calls import ExpertLayer
from ktconv.model.streamed.parts import NotCut, PartedModel
from ktconv.model.streamed.probe import (
    Watch,
    WriteOnly,
    fingerprint,
    is_empty_dict,
    kind_of,
    randomized,
)


class Asked(NamedTuple):
    """A run's request for the experts' outputs [M, H], given to `Run.go_on`."""

    rows: Tensor
    ids: Tensor
    weights: Tensor


class _Reached(BaseException):
    """The wanted layer has answered; no code of the model catches this."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Run:
    """A window on its way through one layer, or through what follows the last one."""

    def __init__(
        self,
        cut: CutModel,
        index: int,
        ids: Tensor,
        answer: Callable[[int], Any],
        received: list[Any] | None = None,
    ) -> None:
        """`answer` is what a layer before `index` returns. With `received` the run stops behind the
        layers, and all that they, and what follows, were called with is there."""
        self.index, self.answer, self.received = index, answer, received
        self.called = 0  # layers
        self.watch: Watch | None = None
        self._cut, self._ids = cut, ids
        self._greenlet = greenlet(self._forward)

    def start(self) -> Any:
        """`Asked`, or what the layer returns."""
        return self._switch()

    def go_on(self, outputs: Tensor) -> Any:
        """Continue the run, to the value that the layer returns."""
        found = self._switch(outputs)
        if isinstance(found, Asked):
            raise NotCut(self._cut.name, f"layer {self.index} asks its experts twice")
        return found

    def drop(self) -> None:
        """Free what a waiting run has in memory."""
        if self.watch is not None:
            self._cut.watched.discard(self.index)
        self._greenlet.throw()

    def _switch(self, *values: Any) -> Any:
        self._cut.current = self
        return self._greenlet.switch(*values)

    def _forward(self) -> Any:
        count = self._cut.count
        self._cut.renew()
        try:
            found = self._cut.model(input_ids=self._ids, use_cache=False)
        except _Reached as reached:
            return reached.value
        if self.called < count or self.index < count:
            raise NotCut(self._cut.name, f"it does not call layer {self.called}")
        return found


class CutModel:
    """Runs of a `PartedModel`. While it is entered, its layers and experts are replaced, and
    gradients are off."""

    def __init__(self, parted: PartedModel) -> None:
        self._parted, self.model, self.name = parted, parted.model, parted.name
        self.count = len(parted.layers)
        self.current: Run
        self.watched: set[int] = set()  # layers
        self._kinds: dict[int, Any] = {}  # of what layers returned for the first window
        self._outputs: dict[Any, Any] = {}  # one of each kind
        self._assumed: list[Any] = []  # kinds of all layers in the last check
        self._head_checked = False
        self._outside_state: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._entered = ExitStack()

    def __enter__(self) -> CutModel:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            for index, layer in enumerate(self._parted.layers):
                stack.enter_context(_forward_of(layer, self._layer_called(index, layer)))
            for experts in self._parted.experts.values():
                stack.enter_context(_parked(experts, self._experts_called))
            for path, module in self._outside():
                hook = module.register_forward_pre_hook(self._outside_called(path))
                stack.callback(hook.remove)
                if module is self.model.get_input_embeddings():
                    self._parted.load_module(path)  # Llama 4 asks for its device before calling it
            self._outside_state = [
                (module, dict(vars(module)), dict(module._buffers))
                for _, module in self._parted.outside()
            ]
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def renew(self) -> None:
        """Undo what earlier windows left outside the layers: dynamic rotary embeddings depend on
        the longest one."""
        for module, content, buffers in self._outside_state:
            vars(module).update(content)
            module._buffers.clear()
            module._buffers.update(buffers)

    def run(self, index: int, ids: Tensor, before: Any) -> Run:
        """A window `ids` [1, T] before layer `index`, or the number of layers for the logits.
        `before`: what the layer before it returned for this window; nothing for the first one."""
        return Run(self, index, ids, lambda _: before)

    def logits(self, ids: Tensor, last: Any) -> Tensor:
        """[1, T, V] from what the last layer returned. Raises NotCut where they depend on more."""
        with running(self.name):
            other = None if self._head_checked else self._logits_apart(ids, last)
            found: Tensor = self.run(self.count, ids, last).start().logits
        if not self._head_checked and other != fingerprint(found):
            raise NotCut(self.name, "its logits depend on more than the last layer")
        self._head_checked = True
        return found

    # ---- what is called in a run ----

    def _layer_called(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        own = layer.forward

        def called(*args: Any, **named: Any) -> Any:
            run = self.current
            if index != run.called:
                raise NotCut(
                    self.name, f"its layers do not follow each other: {index}, not {run.called}"
                )
            run.called += 1
            if run.received is not None:
                run.received.append(fingerprint((args, named)))
            if index < run.index:
                return run.answer(index)
            unread = NotCut(self.name, f"layer {index} reads what other layers left")
            named = {
                name: WriteOnly(unread) if is_empty_dict(one) else one
                for name, one in named.items()
            }
            if index not in self.watched:
                self.watched.add(index)
                apart = {one for one in self._parted.layers if one is not layer}
                run.watch = Watch({"arguments": (args, named), "": self.model}, apart)
            answer = own(*args, **named)
            self._check_unchanged(run)
            raise _Reached(answer)

        return called

    def _experts_called(self, asked: Asked) -> Tensor:
        run = self.current
        self._check_unchanged(run)
        found: Tensor = getcurrent().parent.switch(asked)
        if run.watch is not None:  # other windows ran meanwhile
            run.watch.begin()
        return found

    def _check_unchanged(self, run: Run) -> None:
        if run.watch is not None and (path := run.watch.changed()) is not None:
            raise NotCut(self.name, f"layer {run.index} changes {path}, which others may read")

    def _outside(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules with weights of their own that are not in the layers."""
        return ((path, one) for path, one in self._parted.outside() if one._parameters)

    def _outside_called(self, path: str) -> Callable[..., None]:
        def called(_module: nn.Module, args: Any) -> None:
            run = self.current
            if run.received is not None and run.called == self.count:
                run.received.append(fingerprint(args))
                raise _Reached(None)
            if any(isinstance(one, Tensor) and one.is_meta for one in args):
                raise NotCut(self.name, f"it uses weights before it calls {path}")
            self._parted.load_module(path)

        return called

    # ---- proof ----

    def check(self, index: int, ids: Tensor, output: Any) -> None:
        """Raises NotCut where a layer depends on more than the output of the layer before it.

        `output` is what layer `index` returned for the window `ids`. If that is what the last check
        took it for, there is nothing to do. Else the model runs with layers that return random
        numbers, several times: in each run those of some layers change. A layer must get the same
        in all runs in which those of the layer before it do not change; for any other layer there
        is one in which those do.
        """
        kind = self._kinds[index] = kind_of(output)
        self._outputs.setdefault(kind, output)
        if self._assumed[index : index + 1] == [kind]:
            return
        self._assumed = [self._kind_like(number) for number in range(self.count)]
        first = self._received(ids, frozenset())
        for bit in range((self.count - 1).bit_length()):
            for value in (0, 1):
                changed = {one for one in range(self.count) if one >> bit & 1 == value}
                found = self._received(ids, changed)
                for number in range(1, len(first)):
                    if number - 1 not in changed and found[number] != first[number]:
                        what = f"layer {number}" if number < self.count else "its head"
                        raise NotCut(self.name, f"{what} depends on more than the layer before it")

    def _kind_like(self, index: int) -> Any:
        """Kind of a layer's return value; for a layer that did not run yet, that of one like it
        before it."""
        if index in self._kinds:
            return self._kinds[index]
        alike = [one for one in self._kinds if self._classes(one) == self._classes(index)]
        known = alike or list(self._kinds)
        return self._kinds[max((one for one in known if one < index), default=min(known))]

    def _classes(self, index: int) -> list[type]:
        return [type(one) for one in self._parted.layers[index].modules()]

    def _received(self, ids: Tensor, changed: Set[int]) -> list[Any]:
        """Arguments of each layer, and of the first module behind them."""

        def answer(index: int) -> Any:
            return randomized(self._outputs[self._assumed[index]], 2 * index + (index in changed))

        received: list[Any] = []
        with running(self.name):
            Run(self, self.count, ids, answer, received).start()
        return received

    def _logits_apart(self, ids: Tensor, last: Any) -> Any:
        """Fingerprint of the logits where only the last layer returns what it has."""

        def answer(index: int) -> Any:
            return last if index == self.count - 1 else randomized(self._like(index, last), index)

        return fingerprint(Run(self, self.count, ids, answer).start().logits)

    def _like(self, index: int, output: Any) -> Any:
        kind = self._assumed[index] if self._assumed else None
        return self._outputs.get(kind, output)


@contextmanager
def _forward_of(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


@contextmanager
def _parked(layer: ExpertLayer, ask: Callable[[Asked], Tensor]) -> Iterator[None]:
    """A module in place of a layer's experts that asks for their outputs."""
    site = layer.site
    own, before = site.stored, site.module

    class Parked(packed_class(own)):  # type: ignore[misc]
        """Has no experts."""

        def _fetched(self, *inputs: Tensor) -> list[Tensor]:
            """Wherever the model is."""
            return list(inputs)

        def summed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return ask(Asked(rows, ids, weights))

    origins = torch.zeros(own.count, dtype=torch.int64).numpy()
    asked: Any = SimpleNamespace(count=own.count, hidden=own.hidden, origins=origins)
    module: PackedExperts = Parked(asked, None, own)
    setattr(site.parent, site.name, module.eval())
    try:
        yield
    finally:
        setattr(site.parent, site.name, before)


def first_tensor(value: Any) -> Tensor:
    """The hidden states in what a layer returned. CheckpointError where there are none."""
    if isinstance(value, Tensor):
        return value
    for one in value if isinstance(value, (list, tuple)) else ():
        if isinstance(one, Tensor) and one.is_floating_point():
            return one
    raise CheckpointError(f"a layer returned {type(value).__name__}, not hidden states")
