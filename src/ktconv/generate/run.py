"""`ktconv generate`: from a request to text, as it comes, and the facts about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from ktconv.generate.decoding import end_tokens, generate, stop_strings
from ktconv.generate.loading import OpenedModel
from ktconv.generate.prompt import TextStream, prompt_tokens, room_for
from ktconv.generate.request import GenerateRequest
from ktconv.model.load import running
from ktconv.system.text import Notify


def run(request: GenerateRequest, notify: Notify, told: Callable[[str], bool]) -> dict[str, Any]:
    """Generates. `told` gets pieces of the text as soon as they are certain, and says whether to go
    on. Raises KtconvError for what cannot be loaded or asked for."""
    opened = OpenedModel(request.output, request.source)
    ids = prompt_tokens(opened.tokenizer, request.prompt, request.chat, opened.name)
    most = room_for(ids, request.max_tokens, opened.context)
    with opened.loaded(
        notify, threads=request.threads, memory=request.memory, outside=request.outside
    ) as one:
        ends = end_tokens(one.model, opened.tokenizer, opened.name)
        stops = _Stops(stop_strings(one.model, opened.name))
        stream = TextStream(opened.tokenizer)
        pieces: list[str] = []

        def tell(token: int) -> bool:
            piece = stream.add(token)
            pieces.append(piece)
            stops.add(piece)
            return told(piece) and not stops.met if piece else True

        with running(opened.name):
            tokens, timing = generate(
                one.model, ids, most, request.sampling, ends, tell, one.step_threads
            )
        pieces.append(stream.end())
        stops.add(pieces[-1])
        told(pieces[-1])
    if tokens[-1] in ends:
        ended_by = "end token"
    elif stops.met:
        ended_by = "stop string"
    else:
        ended_by = "length" if len(tokens) == most else "reader"
    step = median(timing.steps_s) if timing.steps_s else None
    return {
        "schema": 1,
        "kind": "generated text",
        "output": str(request.output),
        "source": None if request.source is None else str(request.source),
        "method": one.method,
        "threads": one.threads,
        "on_kernels": {
            name: getattr(one.outside, name)
            for name in ("linear_layers", "norms", "routers", "decoder_layers")
        },
        "text": "".join(pieces),
        "tokens": tokens,
        "prompt_tokens": len(ids),
        "ended_by": ended_by,
        "prefill_s": timing.prefill_s,
        "prefill_tokens_s": len(ids) / timing.prefill_s,
        "decode_ms": None if step is None else 1000 * step,
        "decode_tokens_s": None if step is None else 1 / step,
    }


class _Stops:
    """Strings that end a text, looked for piece by piece."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._longest = max(map(len, strings), default=0)
        self._end = ""  # of the text, in which a string may have begun
        self.met = False

    def add(self, piece: str) -> None:
        """Look for them in the text with its next piece."""
        recent = self._end + piece
        self.met = self.met or any(one in recent for one in self._strings)
        self._end = recent[max(0, len(recent) - self._longest) :]
