"""`push`: one output to one repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.push.content import Content, Progression, content_of
from ktconv.push.hub import MAIN, Request, Sent, check_repository, check_revision, send
from ktconv.system.text import first_few
from ktconv.system.units import counted, format_size
from ktconv.verify.run import unwatched
from ktconv.writer.manifest import MANIFEST

_NAMED = 10  # files that are not sent


class Pushed(Struct, frozen=True):
    """Result of a push: what was sent; without `sent`: what would be."""

    request: Request
    content: Content
    sent: Sent | None = None

    def facts(self) -> dict[str, Any]:
        """JSON-ready."""
        request, sent = self.request, self.sent
        return {
            "schema": 1,
            "output": str(request.output),
            "repository": request.repository,
            "revision": request.revision or MAIN,
            "private": request.private,
            "files": len(self.content.files),
            "bytes": self.content.nbytes,
            "names": list(self.content.files),
            "not_sent": list(self.content.not_sent),
            "pushed": sent is not None,
            "commit": sent.commit if sent else None,
            "url": sent.url if sent else None,
            "pull_request": sent.pull_request if sent else None,
        }

    def lines(self) -> Iterator[str]:
        """Lines for people."""
        where = f"{self.request.repository} ({self.request.revision or MAIN})"
        what = f"{counted(len(self.content.files), 'file')}, {format_size(self.content.nbytes)}"
        if self.sent is None:
            yield f"Would send {what}, to {where}:"
            yield from (f"  {name}  {format_size(n)}" for name, n in self.content.files.items())
            yield from not_sent(self.content)
            return
        where = f"a pull request to {where}" if self.sent.pull_request else where
        yield f"{self.request.output} is in {where}: {what}."
        yield self.sent.pull_request or self.sent.url


def not_sent(content: Content) -> Iterator[str]:
    """A line that names what lies in the output and stays there; none where nothing does."""
    if names := content.not_sent:
        yield f"Not sent, since {MANIFEST} does not name them: {first_few(names, _NAMED)}."


def push(
    request: Request,
    dry_run: bool = False,
    bars: bool = True,
    begin: Callable[[Content], None] = lambda _: None,
    progression: Progression = unwatched,
) -> Pushed:
    """Read and check the output and send it; with `dry_run` check it, without a network.

    `bars`: let the hub's library show them; `begin` is called before something is sent;
    `progression` shows how far the check is. Raises UsageError for a repository or branch that
    cannot be, OutputError for an output that is not complete or not as it was written, and as
    `hub.send`.
    """
    check_repository(request.repository)
    check_revision(request.revision)
    if request.create_pr and request.revision not in (None, MAIN):
        raise UsageError(
            "--create-pr opens a pull request against main, not against --revision",
            "omit one of the two",
        )
    content = content_of(request.output, progression)
    if dry_run:
        return Pushed(request, content)
    begin(content)
    return Pushed(request, content, send(content, request, bars))
