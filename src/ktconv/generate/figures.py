"""`ktconv bench --generate`: from its options to rows as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ktconv.bench.command import MOST_TOKENS, parse_threads
from ktconv.bench.render import render_report
from ktconv.bench.run import Report
from ktconv.errors import UsageError
from ktconv.generate.measure import GenerateBench, WholeRow, bench_whole, told_of_size
from ktconv.source.model_source import ModelSource
from ktconv.system.text import Notify

_COLUMNS: dict[str, Callable[[WholeRow], str]] = {
    "engine": lambda row: row.engine,
    "method": lambda row: row.method,
    "threads": lambda row: str(row.threads),
    "prompt": lambda row: str(row.prompt_tokens),
    "tokens/s read": lambda row: f"{row.prefill_tokens_s:.1f}",
    "experts s": lambda row: f"{row.prefill_experts_s:.2f}",
    "outside s": lambda row: f"{row.prefill_s - row.prefill_experts_s:.2f}",
    "ms a token": lambda row: f"{row.decode_ms:.1f}",
    "experts ms": lambda row: f"{row.decode_experts_ms:.1f}",
    "outside ms": lambda row: f"{row.decode_ms - row.decode_experts_ms:.1f}",
    "tokens/s written": lambda row: f"{row.decode_tokens_s:.1f}",
}


def render(report: Report[WholeRow], form: str, notes: Sequence[str] = ()) -> str:
    """The report in one of bench.render.FORMATS, without a newline at its end."""
    below = [told_of_size(report.rows[0]), *notes]
    return render_report(report, form, _COLUMNS, lambda _: "", {}, *below)


def run_whole(
    model: str,
    source: ModelSource | None,
    counts: str,
    threads: str,
    memory: str,
    seed: int,
    form: str,
    notify: Notify,
    show: Callable[[str], None],
) -> None:
    """Shows what `--generate` measures."""
    prompt, new = parse_counts(counts)
    pools = parse_threads(threads)
    if len(pools) > 1:
        raise UsageError("--generate takes one number of --threads", "run it for each")
    request = GenerateBench(
        output=Path(model),
        source=source,
        prompt=prompt,
        new=new,
        threads=pools[0],
        memory=memory,
        seed=seed,
    )
    report, notes = bench_whole(request, notify)
    if form not in ("table", "markdown"):
        for note in notes:
            notify(note)
    show(render(report, form, notes))


def parse_counts(text: str) -> tuple[int, int]:
    """Tokens of the prompt and new ones, of --generate."""
    words = text.split(",")
    if len(words) == 2 and all(word.strip().isdecimal() for word in words):
        prompt, new = map(int, words)
        if 1 <= prompt <= MOST_TOKENS and 2 <= new <= MOST_TOKENS:
            return prompt, new
    raise UsageError(
        f"--generate {text!r} must be the tokens of a prompt and of its answer, which are from 1 "
        f"and from 2 to {MOST_TOKENS}",
        "for example --generate 512,128",
    )
