"""A request as the engines see it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be decoded.

    Attributes:
        id: of the request.
        prompt: its tokens, at least one.
        max_new_tokens, temperature, seed, max_drafts: as for `speculation.decode`.
        from_store: its prefix may come from the store. A cache from there is another one than that which is computed
            for this prompt, and what is stored changes.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    max_drafts: int
    from_store: bool
