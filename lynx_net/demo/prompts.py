"""Prompts of an exact length: a document and a question in the model's chat template."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lynx_net.demo.options import MIN_PROMPT_TOKENS, DemoError

if TYPE_CHECKING:
    from pathlib import Path

    from lynx_net.demo.options import DemoOptions

__all__ = [
    "DEFAULT_QUESTION",
    "FILE_QUESTION",
    "Prompt",
    "build_prompt",
    "default_document",
    "read_document",
    "source_for",
]

DEFAULT_QUESTION = "Explain in a few sentences what lynx_net does and why decoding can start early."
"""Asked about the document that comes with the package."""

FILE_QUESTION = "Summarise the document above in a few sentences."
"""Asked about a document of the user's when no question is given."""

_MARK = "\x00document\x00"
"""Stands for the document while the chat template is filled in; no text file holds it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt.

    Attributes:
        tokens: token ids, the chat template's included.
        document_tokens: how many of them are the document's.
        cut: True if the document was longer than there was room for.
    """

    tokens: tuple[int, ...]
    document_tokens: int
    cut: bool


def default_document() -> str:
    """The description of this project that comes with the package."""
    return importlib.resources.files("lynx_net.demo").joinpath("document.txt").read_text("utf-8")


def read_document(file: Path) -> str:
    """Read a UTF-8 text file.

    Raises:
        DemoError: there is no such file, or it is not text.
    """
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise DemoError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DemoError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise DemoError(f"{file} holds no text")
    return text.replace(_MARK, "")


def build_prompt(tokenizer: Any, document: str, question: str, tokens: int) -> Prompt:
    """Put a document and a question about it into the chat template, in exactly `tokens` tokens.

    Only the document gives way: its tokens are cut at its end. What stands before and behind it is
    tokenised apart from it, so that the cut can fall between any two tokens. A document that is too
    short gives a shorter prompt, as long as that has `MIN_PROMPT_TOKENS` tokens.

    Args:
        tokenizer: a transformers tokenizer with a chat template.

    Raises:
        DemoError: the question leaves no room for the document, or the prompt is too short.
    """
    message = {"role": "user", "content": f"{_MARK}\n\n{question}"}
    rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, after = (_token_ids(tokenizer, part) for part in rendered.split(_MARK))
    room = tokens - len(before) - len(after)
    if room < 1:
        raise DemoError(f"the question alone fills {tokens} prompt tokens; give a shorter one or more tokens")
    body = _token_ids(tokenizer, document.strip())
    prompt = (*before, *body[:room], *after)
    if len(prompt) < MIN_PROMPT_TOKENS:
        raise DemoError(
            f"the document is too short: with the question it has {len(prompt)} tokens and needs {MIN_PROMPT_TOKENS}"
        )
    return Prompt(prompt, min(len(body), room), len(body) > room)


def source_for(options: DemoOptions) -> tuple[str, str]:
    """The document and the question that the options ask for.

    Raises:
        DemoError: the document cannot be read.
    """
    if options.prompt_file is None:
        return default_document(), options.question or DEFAULT_QUESTION
    return read_document(options.prompt_file), options.question or FILE_QUESTION


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`; its special tokens are recognised, none are added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
