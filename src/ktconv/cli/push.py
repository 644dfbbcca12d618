"""`ktconv push`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ktconv.cli.events import events
from ktconv.cli.exits import errors_shown, interruptible
from ktconv.cli.help import OUTPUT
from ktconv.cli.options import ProgressOption, progress_mode, progress_over
from ktconv.cli.output import JsonOption, notify, print_result
from ktconv.cli.parameters import argument, flag, option
from ktconv.system.units import counted, format_size

if TYPE_CHECKING:
    from ktconv.push.content import Content


def push_command(
    output: Annotated[Path, argument("A finished output of a conversion.", "OUTPUT")],
    repository: Annotated[str, argument("Model repository of the hub: org/name.", "REPOSITORY")],
    private: Annotated[
        bool,
        flag(
            "--private",
            "Make the repository private.",
            OUTPUT,
            "One that exists and is public is refused.",
        ),
    ] = False,
    revision: Annotated[
        str | None,
        option(
            "Branch to push to; default: main.",
            "BRANCH",
            panel=OUTPUT,
            detail="Made if it is missing. `refs/pr/NUMBER` is a pull request.",
        ),
    ] = None,
    create_pr: Annotated[
        bool,
        flag("--create-pr", "Open a pull request instead of pushing.", OUTPUT),
    ] = False,
    message: Annotated[str | None, option("Message of the commit.", "TEXT", panel=OUTPUT)] = None,
    dry_run: Annotated[
        bool,
        flag(
            "--dry-run",
            "Check OUTPUT and list what would be sent.",
            detail="Sends nothing, and needs no network.",
        ),
    ] = False,
    progress: ProgressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Send a finished output to the Hugging Face hub, with the token of `hf auth login`.
    Run the same command again to continue an interrupted upload.

    Example: ktconv push qwen3-int4 org/Qwen3-30B-A3B-int4 --private
    """
    with errors_shown(as_json, progress=progress):
        from ktconv.push.command import push
        from ktconv.push.hub import Request

        sending = False

        def begin(content: Content) -> None:
            nonlocal sending
            sending = True
            _begin(content)

        request = Request(output, repository, private, revision, create_pr, message)
        with interruptible(lambda: _NEXT_STEP if sending else _NOTHING_SENT):
            done = push(request, dry_run, progress_mode() == "bar", begin, progress_over)
        print_result(as_json, done.facts(), done.lines)


def _begin(content: Content) -> None:
    """Say what will be sent. The hub's library shows the bytes that are sent as bars."""
    from ktconv.push.command import not_sent

    for line in not_sent(content):
        notify(line)
    if listener := events():
        listener.emit("started", units=list(content.files), bytes=content.nbytes)
    elif progress_mode() == "lines":
        notify(f"Sending {counted(len(content.files), 'file')}, {format_size(content.nbytes)}")


_NOTHING_SENT = "Nothing was sent."
_NEXT_STEP = "What was sent stays there: run the same command again to continue."
