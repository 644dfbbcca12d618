"""`ktconv generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click

from ktconv.cli.conflicts import Conflict, one_of, refuse_conflicts
from ktconv.cli.exits import NOTHING_WRITTEN, Hints, errors_shown, interruptible
from ktconv.cli.help import ADVANCED, RUN, SOURCE
from ktconv.cli.options import ThreadsOption
from ktconv.cli.output import JsonOption, notify, print_piece, print_result
from ktconv.cli.parameters import argument, choice, flag, option
from ktconv.cli.sources import USUAL, Reading, reads_source
from ktconv.errors import MemoryShortError, PackedExpertsError
from ktconv.system.units import counted

GenerateMemory = Literal["auto", "map", "copy", "shared"]  # as runtime.memory.MEMORY
Outside = Literal["kernels", "transformers"]
_HINTS: Hints = {
    PackedExpertsError: "give the checkpoint that OUTPUT was converted from: --source MODEL",
    MemoryShortError: "close other programs, or use a machine with more memory",
    MemoryError: "close other programs, or use a machine with more memory",
}


CONFLICTS = (
    *one_of("--prompt", "--prompt-file"),
    Conflict(
        "!--prompt !--prompt-file",
        "generate needs a prompt",
        "give --prompt TEXT or --prompt-file FILE",
    ),
)


@reads_source("map", "tower", "prune")
def generate(
    context: click.Context,
    output: Annotated[
        Path,
        argument(
            "Output of quantize-cpu or quantize-gpu, or a checkpoint.",
            "OUTPUT",
            "A checkpoint takes part as it is where the kernels compute with its numbers: bf16, "
            "fp8, rawint4, W4A16, mxfp4 and others.",
        ),
    ],
    prompt: Annotated[
        str | None, option("Text to continue or to answer.", "TEXT", panel=RUN)
    ] = None,
    prompt_file: Annotated[
        Path | None,
        option(
            "File with the text; -: standard input.",
            "FILE",
            panel=RUN,
            detail="UTF-8. A line feed at its end is no part of the prompt.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        option(
            "The original checkpoint.",
            "MODEL",
            panel=SOURCE,
            detail="Attention, embeddings, routers and the tokenizer come from there. An output in "
            "the names of a model is a checkpoint itself, and needs none.",
        ),
    ] = None,
    reading: Reading = USUAL,
    chat: Annotated[
        bool | None,
        flag(
            "--chat/--no-chat",
            "Put the prompt into the model's chat template.",
            RUN,
            "The template is used by default where the tokenizer has one.",
        ),
    ] = None,
    max_tokens: Annotated[int, option("Maximum number of new tokens.", "N", min=1)] = 128,
    temperature: Annotated[
        float,
        option("Randomness; 0: always the likeliest token.", "F", min=0.0, max=100.0),
    ] = 0.0,
    top_p: Annotated[
        float,
        option(
            "Choose among the likeliest tokens of this share.",
            "F",
            "--top-p",
            min=0.0,
            max=1.0,
            detail="The fewest tokens whose probabilities add up to it. With --temperature.",
        ),
    ] = 1.0,
    seed: Annotated[int, option("Seed of random choices.", "N", panel=ADVANCED, min=0)] = 0,
    threads: ThreadsOption = 0,
    memory: Annotated[
        GenerateMemory,
        choice(
            GenerateMemory,
            "Memory for the experts of OUTPUT.",
            panel=ADVANCED,
            detail="- map: in their files\n- copy: on huge pages\n- shared: a copy that processes "
            "share\n- auto: map, or copy where pages cannot be moved",
        ),
    ] = "auto",
    outside: Annotated[
        Outside,
        choice(
            Outside,
            "Code for single tokens outside the experts.",
            panel=ADVANCED,
            detail="- kernels: ktconv's, for the modules that they know\n"
            "- transformers: the model's own, to compare",
        ),
    ] = "kernels",
    as_json: JsonOption = False,
) -> None:
    """Write text with a converted model: experts on the kernels, the rest by transformers.

    Example: ktconv generate qwen3-int4 --source Qwen/Qwen3-30B-A3B --prompt "Why is the sky blue?"
    """
    with errors_shown(as_json, _HINTS):
        from ktconv.generate.request import GenerateRequest, Sampling
        from ktconv.model import require_packages

        refuse_conflicts(context, CONFLICTS)
        request = GenerateRequest(
            output=output,
            source=reading.source_if(source),
            prompt=_read(prompt_file) if prompt is None else prompt,
            chat=chat,
            max_tokens=max_tokens,
            sampling=Sampling(temperature, top_p, seed),
            threads=threads or None,
            memory=memory,
            outside=outside == "kernels",
        )
        require_packages()
        from ktconv.generate.run import run

        with interruptible(lambda: NOTHING_WRITTEN if as_json else "The text is unfinished."):
            facts = run(request, notify, (lambda _: True) if as_json else print_piece)
        if not as_json:
            print_piece("\n")
            notify(_told(facts))
        print_result(as_json, facts, lambda: ())


def _read(file: Path | None) -> str:
    """The prompt in a file, or on standard input."""
    from ktconv.model.text import read_text

    path = Path("/dev/stdin") if file == Path("-") else file
    return read_text(path, "--prompt-file")[0].removesuffix("\n")


def _told(facts: dict[str, Any]) -> str:
    """A sentence with the times of a run."""
    words = (
        f"{counted(facts['prompt_tokens'], 'token')} read in {facts['prefill_s']:.2f} s "
        f"({facts['prefill_tokens_s']:.1f} tokens/s), {counted(len(facts['tokens']), 'token')} "
        "written"
    )
    if facts["decode_ms"] is None:
        return words
    return f"{words}, {facts['decode_ms']:.1f} ms each ({facts['decode_tokens_s']:.1f} tokens/s)"
