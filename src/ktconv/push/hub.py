"""Sending files through huggingface_hub, and what its errors mean.

The token is the one of the hub's own login. It is never an argument here, and texts of the server
are shown without it.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from ktconv import __version__
from ktconv.errors import KtconvError, ResourceError, UsageError
from ktconv.push.content import Content
from ktconv.source.remote.network_errors import cause, first_line, is_of_network, status_of
from ktconv.system import waiting

MAIN = "main"
_NO_BRANCH = re.compile(r"[^\w./-]|\.\.|\s", re.ASCII)  # git allows more, tools and URLs do not
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LONGEST_BRANCH = 200  # bytes: servers keep branches as files
_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_MOST_CHARACTERS = 96
_AGAIN = "run the same command again: what the hub has already is not sent again"
_LOGIN = "log in with a token that may write: hf auth login"


class Request(Struct, frozen=True):
    """The request of `push`: what to push, and where to."""

    output: Path
    repository: str  # org/name
    private: bool = False  # of a repository that is made
    revision: str | None = None  # a branch; None: main
    create_pr: bool = False
    message: str | None = None


class Sent(Struct, frozen=True):
    """State of the hub after sending."""

    commit: str
    url: str
    pull_request: str | None


def check_repository(name: str) -> None:
    """UsageError unless `name` is org/name, as the hub allows it."""
    kind, _, rest = name.partition("/")
    if kind in ("datasets", "spaces", "kernels", "buckets") and "/" in rest:
        raise UsageError(f"{name} is not a model repository", "give org/name of a model")
    parts = name.split("/")
    fits = len(parts) == 2 and all(_NAME.fullmatch(part) for part in parts)
    if not fits or len(name) > _MOST_CHARACTERS or re.search(r"--|\.\.|\.git$", name):
        raise UsageError(
            f"{name} cannot be a repository of the hub",
            f"give org/name, of letters, digits, -, _ and ., at most {_MOST_CHARACTERS} "
            "characters, without -- and ..",
        )


def check_revision(name: str | None) -> None:
    """UsageError unless `name` can be a branch of the hub's git, or is refs/pr/NUMBER."""
    if name is None or re.fullmatch(r"refs/pr/[0-9]{1,9}", name):
        return
    parts = name.split("/")
    wrong = (
        _NO_BRANCH.search(name)
        or parts[0] == "refs"
        or any(
            not part or part.startswith((".", "-")) or part.endswith((".", ".lock"))
            for part in parts
        )
        or len(name.encode(errors="replace")) > _LONGEST_BRANCH
    )
    if wrong:
        raise UsageError(
            f"--revision {name} cannot be a branch",
            "give a name like int4 or v1.0, of letters, digits, -, _, / and single dots",
        )
    if _COMMIT.fullmatch(name):
        raise UsageError(
            f"--revision {name} is a commit, and only a branch can be pushed to",
            "give the name of a branch, which is made if it is missing",
        )


def send(content: Content, request: Request, bars: bool = True) -> Sent:
    """Make the repository if there is none, and send the files of `content` to it; `bars`: the
    library's.

    UsageError without the package, a token or the right to write, ResourceError where the hub
    cannot be reached or refuses.
    """
    api, repository, revision = _api(), request.repository, request.revision

    def upload() -> Any:
        _prepare(api, repository, request.private)
        if revision not in (None, MAIN) and not str(revision).startswith("refs/"):
            api.create_branch(repository, branch=str(revision), exist_ok=True)
        return api.upload_folder(
            repo_id=repository,
            folder_path=content.output,
            commit_message=request.message or f"Upload the output of ktconv {__version__}",
            revision=revision,
            create_pr=request.create_pr,
            allow_patterns=[glob.escape(name) for name in content.files],
        )

    with errors_explained(repository), _bars(bars):
        done = waiting.abandoned(upload)
    return Sent(str(done.oid), str(done.commit_url), done.pr_url)


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise UsageError(
            "push needs the package huggingface_hub", "pip install 'ktconv[hub]'"
        ) from None
    return HfApi(token=True, library_name="ktconv", library_version=__version__)


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """The library's bars; HF_HUB_DISABLE_PROGRESS_BARS, where it is set, decides."""
    from huggingface_hub import constants, utils

    if shown or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _prepare(api: Any, repository: str, private: bool) -> None:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        there = api.model_info(repository)
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:  # or one that we may not know of: then it cannot be made
        api.create_repo(repository, private=private or None, exist_ok=True)
        return
    if private and there.private is False:
        raise UsageError(
            f"{repository} exists already, and everybody can read it",
            "make it private in its settings, or push to another name",
        )


# ---- errors --------------------------------------------------------------------------------


@contextmanager
def errors_explained(repository: str) -> Iterator[None]:
    """Errors of the hub and its library as ours, in one sentence."""
    try:
        yield
    except (KtconvError, MemoryError):
        raise
    except Exception as error:
        found = explained(error, repository)
        if found is None:
            raise
        raise found from None


def explained(error: Exception, repository: str) -> KtconvError | None:
    """Explain an error in one sentence; None for one that neither the hub nor a network has."""
    from huggingface_hub import errors, get_token

    if isinstance(error, errors.OfflineModeIsEnabled):
        return UsageError(
            "push needs the hub, and HF_HUB_OFFLINE forbids it", "unset HF_HUB_OFFLINE"
        )
    if isinstance(error, errors.LocalTokenNotFoundError):
        return UsageError("push needs a token of the hub, and there is none", _LOGIN)
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"the hub does not allow this: {first_line(error)}")
    if isinstance(error, errors.HfHubHTTPError) and (status := status_of(error)) is not None:
        said = first_line(error.server_message or "", get_token())
        return _of_status(status, repository, said)
    if isinstance(error, OSError) and error.filename is not None:
        return ResourceError(f"{error.filename} cannot be read: {error.strerror or error}")
    if isinstance(error, KeyError):  # what the library makes of an answer without some field
        return ResourceError(f"the hub's answer for {repository} has no {error}", _AGAIN)
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        status = status_of(error.__cause__)
        why = f" (status {status})" if status else ""
        said = first_line(error, get_token())
        return ResourceError(f"the upload to {repository} stopped: {said}{why}", _AGAIN)
    if isinstance(error, json.JSONDecodeError):
        return ResourceError(f"the hub's answer for {repository} is no JSON", _AGAIN)
    if isinstance(error, ValueError):  # of the model card, or of storage
        said = first_line(" ".join(str(error).split()), get_token())
        return UsageError(f"the hub refuses this content for {repository}: {said}")
    if isinstance(error, OSError | RuntimeError) or is_of_network(error):
        said = first_line(cause(error), get_token())
        return ResourceError(
            f"the hub cannot be reached for {repository}: {said}",
            f"check the network, then {_AGAIN}",
        )
    return None


def _of_status(status: int, repository: str, said: str) -> KtconvError:
    if status == 401:
        return UsageError("the hub does not accept the token", _LOGIN)
    if status == 403:
        words = f" ({said})" if said else ""
        return UsageError(
            f"the token may not write to {repository}{words}",
            f"{_LOGIN}; or push to a name of your own",
        )
    if status == 404:
        return UsageError(
            f"the hub has no {repository} that this token can see, or no such revision",
            f"check both names, or {_LOGIN}",
        )
    if status == 409:
        return ResourceError(
            f"the hub reports a conflict for {repository}: {said or 'something else changed it'}",
            "wait until nothing else writes there, then run the same command again",
        )
    if status in (400, 413, 422):
        return UsageError(f"the hub refuses this content for {repository}: {said or status}")
    return ResourceError(
        f"the hub answered {status} for {repository}: {said or 'no reason'}", _AGAIN
    )
