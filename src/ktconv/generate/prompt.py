"""Tokens of a prompt, and the text of tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktconv.errors import CheckpointError, UsageError
from ktconv.model.load import first_line
from ktconv.system.units import counted

_BROKEN = "\ufffd"  # what tokenizers write for bytes that are no whole character yet


def prompt_tokens(tokenizer: Any, prompt: str, chat: bool | None, name: Path) -> list[int]:
    """Token ids of a prompt: as a user's message in the tokenizer's chat template, or as it is.

    `chat`: whether to use the template; None: where there is one. UsageError where it is asked for
    and missing, and for a prompt without tokens; CheckpointError where it cannot be rendered.
    """
    template = getattr(tokenizer, "chat_template", None)
    if chat and not template:
        raise UsageError(
            f"the tokenizer of {name} has no chat template",
            "use --no-chat, or put the template into tokenizer_config.json",
        )
    if template and chat is not False:
        try:
            # transformers renders it in a sandbox of Jinja, which reaches no file and no module.
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs
            raise CheckpointError(
                f"the chat template of {name} cannot be rendered: {first_line(error)}",
                "use --no-chat",
            ) from error
        ids = _encoded(tokenizer, str(text), special=False)  # which the template has written
    else:
        ids = _encoded(tokenizer, prompt, special=True)
    if not ids:
        raise UsageError("the prompt has no tokens", "give some text")
    return ids


def _encoded(tokenizer: Any, text: str, special: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of the command line that are no text
        raise UsageError(
            "the prompt has bytes that are not UTF-8", "give it as UTF-8 text"
        ) from error
    try:
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    except (TypeError, ValueError) as error:
        raise UsageError(f"the tokenizer cannot read the prompt: {first_line(error)}") from error


def room_for(prompt: Sequence[int], wanted: int, most: int) -> int:
    """Number of new tokens, at most `wanted`, that a context of `most` tokens has room for.
    UsageError where that is none."""
    if len(prompt) >= most:
        raise UsageError(
            f"the prompt has {counted(len(prompt), 'token')}, and the model reads at most {most} "
            "with its answer",
            "give a shorter prompt",
        )
    return min(wanted, most - len(prompt))


class TextStream:
    """Text of tokens one by one: all pieces together are the text of all tokens.

    A token can be a part of a character, and what a tokenizer writes for one can depend on the one
    before. So tokens are decoded with those of the piece before, and kept back while the text ends
    within a character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self._context, self._told = 0, 0  # first token that is decoded again, first that is new

    def add(self, token: int) -> str:
        """The text that is certain now; "" where none is."""
        self.tokens.append(token)
        return self._new(last=False)

    def end(self) -> str:
        """The text that was kept back."""
        return self._new(last=True)

    def _new(self, last: bool) -> str:
        before = self._text(self.tokens[self._context : self._told])
        text = self._text(self.tokens[self._context :])
        if len(text) <= len(before) or (text.endswith(_BROKEN) and not last):
            return ""
        self._context, self._told = self._told, len(self.tokens)
        return text[len(before) :]

    def _text(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
