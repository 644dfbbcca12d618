"""A model's own forward pass, run up to one of its layers and stopped there.

All other layers answer with what is recorded: whatever the layer before the wanted one returned.
So masks, rotary embeddings and whatever else is between layers is the model's own code. `check`
proves that a layer depends on nothing but the output of the layer before it, and the text.

A run is a greenlet, which stops in the middle of a layer where its experts are asked.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from torch import Tensor, nn

from ktconv.errors import CheckpointError
from ktconv.model.load import running
from ktconv.model.module import PackedExperts, packed_class
from ktconv.model.streamed.calls import ExpertLayer
from ktconv.model.streamed.parts import NotCut, PartedModel


class Asked(NamedTuple):
    """What a run waits for: the experts' outputs [M, H], given to `Run.go_on`."""

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

    def __init__(self, cut: CutModel, index: int, ids: Tensor, before: Any) -> None:
        self._cut, self._index, self._ids, self._before = cut, index, ids, before
        self._greenlet = greenlet(self._forward)

    def start(self) -> Any:
        """`Asked`, or what the layer returns."""
        return self._switch()

    def go_on(self, outputs: Tensor) -> Any:
        """What the layer returns."""
        found = self._switch(outputs)
        if isinstance(found, Asked):
            raise NotCut(self._cut.name, f"layer {self._index} asks its experts twice")
        return found

    def drop(self) -> None:
        """Free what a waiting run has in memory."""
        self._greenlet.throw()

    def _switch(self, *values: Any) -> Any:
        self._cut._current = self._index, self._before
        return self._greenlet.switch(*values)

    def _forward(self) -> Any:
        try:
            return self._cut.model(input_ids=self._ids, use_cache=False)
        except _Reached as reached:
            return reached.value


class CutModel:
    """Runs of a `PartedModel`. While it is entered, its layers and experts are replaced, and
    gradients are off."""

    def __init__(self, parted: PartedModel) -> None:
        self._parted, self.model, self.name = parted, parted.model, parted.name
        self._current: tuple[int, Any] = 0, None
        self._stubs: Callable[[int, Any], Any] | None = None  # of a check
        self._kinds: dict[int, Any] = {}  # of what layers returned for the first window
        self._outputs: dict[Any, Any] = {}  # one of each kind
        self._entered = ExitStack()

    def __enter__(self) -> CutModel:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            for index, layer in enumerate(self._parted.layers):
                stack.enter_context(_forward_of(layer, self._layer_called(index, layer)))
            for experts in self._parted.experts.values():
                stack.enter_context(_parked(experts))
            for path, module in self._outside():
                hook = module.register_forward_pre_hook(self._outside_called(path))
                stack.callback(hook.remove)
                if module is self.model.get_input_embeddings():
                    self._parted.load_module(path)  # Llama 4 asks for its device before calling it
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def run(self, index: int, ids: Tensor, before: Any) -> Run:
        """A window `ids` [1, T] before layer `index`, or the number of layers for the logits.
        `before`: what the layer before it returned for this window; nothing for the first one."""
        return Run(self, index, ids, before)

    def logits(self, ids: Tensor, last: Any) -> Tensor:
        """[1, T, V] from what the last layer returned."""
        with running(self.name):
            found: Tensor = self.run(len(self._parted.layers), ids, last).start().logits
        return found

    # ---- what is called in a run ----

    def _layer_called(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        own = layer.forward

        def called(*args: Any, **named: Any) -> Any:
            if self._stubs is not None:
                return self._stubs(index, (args, named))
            wanted, before = self._current
            if index < wanted:
                return before
            if index > wanted:
                raise NotCut(self.name, f"it calls layer {index} before layer {wanted}")
            named = {name: _write_only(self.name, index, one) for name, one in named.items()}
            kept = _containers((args, named))
            answer = own(*args, **named)
            if kept != _containers((args, named)):
                raise NotCut(self.name, f"layer {index} shares data with others beside its output")
            raise _Reached(answer)

        return called

    def _outside(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules with weights of their own that are not in the layers."""
        prefix = f"{self._parted.path}."
        for path, module in self.model.named_modules():
            if not f"{path}.".startswith(prefix) and module._parameters:
                yield path, module

    def _outside_called(self, path: str) -> Callable[..., None]:
        def called(_module: nn.Module, args: Any) -> None:
            if self._stubs is not None:
                self._stubs(-1, args)
            self._parted.load_module(path)

        return called

    # ---- proof ----

    def check(self, index: int, ids: Tensor, output: Any) -> None:
        """Raises NotCut where a layer depends on more than the output of the layer before it.

        `output` is what layer `index` returned for the window `ids`. If layers before it returned
        the same kinds of objects, nothing is left to check. Else there are three runs in which
        layers return random numbers: those of the even layers change in one, those of the odd
        layers in another. A layer whose predecessor did not change must get the same.
        """
        kind = self._kinds[index] = _kind(output)
        if kind in self._outputs:
            return
        self._outputs[kind] = output
        first, evens, odds = (self._received(ids, changed) for changed in (None, 0, 1))
        for number in range(1, len(first)):
            other = odds if (number - 1) % 2 == 0 else evens
            if not _equal(first[number], other[number]):
                what = f"layer {number}" if number < len(self._parted.layers) else "its head"
                raise NotCut(self.name, f"{what} depends on more than the layer before it")

    def _output_like(self, index: int) -> Any:
        """What a layer returned, or for one that did not run yet, what one before it did."""
        nearest = max((one for one in self._kinds if one <= index), default=min(self._kinds))
        return self._outputs[self._kinds[nearest]]

    def _received(self, ids: Tensor, changed: int | None) -> list[Any]:
        """What each layer, and the first module behind them, is called with."""
        received: list[Any] = []
        count = len(self._parted.layers)

        def stub(index: int, arguments: Any) -> Any:
            if index < 0:
                if len(received) == count:
                    raise _Reached(arguments)
                return None
            if index != len(received):
                raise NotCut(
                    self.name, f"its layers do not follow each other: {index}, not {len(received)}"
                )
            received.append(arguments)
            seed = 2 * index + (index % 2 == changed)
            return _random(self._output_like(index), torch.Generator().manual_seed(seed))

        self._stubs = stub
        try:
            with running(self.name):
                self.model(input_ids=ids, use_cache=False)
        except _Reached as reached:
            received.append(reached.value)
        finally:
            self._stubs = None
        return received


@contextmanager
def _forward_of(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


@contextmanager
def _parked(layer: ExpertLayer) -> Iterator[None]:
    """A module in place of a layer's experts that stops the run."""
    site = layer.site
    own, before = site.own, site.module

    class Parked(packed_class(own)):  # type: ignore[misc]
        """Asks whoever runs the window."""

        def _check(self, *_: Tensor) -> None:
            """Wherever the model is."""

        def summed(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            found: Tensor = getcurrent().parent.switch(Asked(rows, ids, weights))
            return found

    origins = torch.zeros(own.count, dtype=torch.int64).numpy()
    asked: Any = SimpleNamespace(count=own.count, hidden=own.hidden, origins=origins)
    module: PackedExperts = Parked(asked, None, own)
    setattr(site.parent, site.name, module.eval())
    try:
        yield
    finally:
        setattr(site.parent, site.name, before)


class _WriteOnly(dict[Any, Any]):
    """What layers may leave data in for others, as long as none reads them."""

    def __init__(self, name: Any, layer: int) -> None:
        super().__init__()
        self._name, self._layer = name, layer

    def _read(self, *_: Any) -> Any:
        raise NotCut(self._name, f"layer {self._layer} reads what other layers left")

    __getitem__ = __contains__ = __iter__ = __len__ = get = keys = values = items = pop = _read
    setdefault = copy = _read


def _write_only(name: Any, layer: int, value: Any) -> Any:
    """An empty dict is for what layers tell each other; Gemma 4 has one without using it."""
    empty = isinstance(value, (dict, UserDict)) and not value
    return _WriteOnly(name, layer) if empty else value


def _containers(value: Any) -> list[Any]:
    """Which objects each container in the arguments of a layer has."""
    if isinstance(value, _WriteOnly):
        return []
    if isinstance(value, Mapping):
        return [(key, id(one), _containers(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [(id(one), _containers(one)) for one in value]
    return []


def _random(value: Any, generator: torch.Generator) -> Any:
    """Numbers in place of those of a layer's output."""
    if isinstance(value, Tensor) and value.is_floating_point():
        numbers = torch.randn(value.shape, generator=generator)
        return numbers.to(value.device, value.dtype)
    if isinstance(value, Tensor):  # of indices, which stay valid
        return value.roll(generator.initial_seed(), dims=-1) if value.ndim else value
    if isinstance(value, tuple):
        return tuple(_random(one, generator) for one in value)
    if isinstance(value, list):
        return [_random(one, generator) for one in value]
    return value


def _kind(value: Any) -> Any:
    """Types, and the dtypes of tensors."""
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_kind, value))
    return type(value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return True


def first_tensor(value: Any) -> Tensor:
    """The hidden states in what a layer returned. CheckpointError where there are none."""
    if isinstance(value, Tensor):
        return value
    for one in value if isinstance(value, (list, tuple)) else ():
        if isinstance(one, Tensor) and one.is_floating_point():
            return one
    raise CheckpointError(f"a layer returned {type(value).__name__}, not hidden states")
