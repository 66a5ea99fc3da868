"""Tokens to text, piece by piece: whole characters only, and nothing that may turn out to be a stop text."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["TextStream", "TokenTexts"]

CONTEXT_TOKENS = 5
"""Of the prompt: some tokenizers drop the space before a text's first token, so there must be another one before it."""

CHARACTER_TOKENS = 4
"""A character has four bytes at most, hence as many tokens."""

HELD_TOKENS = 8
"""A run of so many tokens that is still no text will not become one."""

UNFINISHED = "\ufffd"
"""What decoding gives for bytes that are not (yet) a character."""


class TextStream:
    """The text of an answer as it grows.

    Args:
        decode: text of some tokens, without special ones.
        prompt: tokens before the answer.
        stop: texts that end the answer; neither they nor what follows becomes part of it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._shown = len(self._tokens)  # tokens whose text was given out or is held
        self._context = 0  # decoding starts here, so that the text of the next tokens comes out as in the whole
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        """A stop text was found; nothing more will come."""

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is certain now."""
        if self.stopped:
            return ""
        self._tokens += tokens
        return self._release(self._fresh(whole=False))

    def finish(self) -> str:
        """The answer ends here: return what was held back."""
        if self.stopped:
            return ""
        text = self._release(self._fresh(whole=True))
        held, self._held = self._held, ""
        return text + held

    def fork(self) -> TextStream:
        """The same stream again, to be continued in another way."""
        other = copy.copy(self)
        other._tokens = self._tokens.copy()
        return other

    def _fresh(self, *, whole: bool) -> str:
        """The text of the tokens behind `_shown`, up to the last one that ends with a whole character."""
        before = self._decode(self._tokens[self._context : self._shown])
        count = len(self._tokens)
        forced = whole or count - self._shown > HELD_TOKENS
        for end in range(count, max(self._shown, count - CHARACTER_TOKENS), -1):
            text = self._decode(self._tokens[self._context : end])
            if not text.endswith(UNFINISHED) or (whole and end == count):
                break
        else:
            if not forced or count == self._shown:
                return ""
            end, text = count, self._decode(self._tokens[self._context :])
        self._context, self._shown = self._shown, end
        return text[len(before) :]

    def _release(self, fresh: str) -> str:
        text = self._held + fresh
        found = [at for at in (text.find(one) for one in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, one) for one in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class TokenTexts:
    """What each token adds to a text: final ones, and drafts behind them.

    A character that has several tokens comes with the last of them; the others add nothing.

    Args:
        decode, prompt: see `TextStream`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._final = TextStream(decode, prompt)
        self._drafts: list[int] = []
        self._tentative: TextStream | None = None  # `_final` and `_drafts`

    def draft(self, token: int) -> str:
        """The text of a further draft."""
        if self._tentative is None:
            self._tentative = self._final.fork()
            self._tentative.push(self._drafts)
        self._drafts.append(token)
        return self._tentative.push([token])

    def retract(self, count: int) -> None:
        """The newest drafts are void."""
        del self._drafts[len(self._drafts) - count :]
        self._tentative = None

    def commit(self, tokens: Sequence[int]) -> list[str]:
        """The texts of further final tokens, which take the place of all drafts."""
        self._drafts.clear()
        self._tentative = None
        return [self._final.push([token]) for token in tokens]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
