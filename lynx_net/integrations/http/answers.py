"""What clients get: completion objects, chunks, and server-sent events, as OpenAI's API has them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lynx_net.integrations.http.models import ServedModel

__all__ = ["DONE", "Answer", "FinishReason", "Usage", "model_entry", "sse"]

FinishReason = Literal["stop", "length"]

DONE = b"data: [DONE]\n\n"
"""Ends a streamed answer."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int

    def to_json(self) -> dict[str, int]:
        """As the API has it."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """Makes the objects of one answer.

    Attributes:
        id: of the request.
        model: its name.
        fingerprint: of the model.
        chat: which of the two shapes.
        include_usage: chunks have a field for it.
        created: seconds since 1970.
    """

    id: str
    model: str
    fingerprint: str
    chat: bool
    include_usage: bool
    created: int

    @classmethod
    def to(cls, request_id: str, model: ServedModel, *, chat: bool, include_usage: bool) -> Answer:
        """The answer that begins now."""
        return cls(request_id, model.name, f"fp_{model.fingerprint[:10]}", chat, include_usage, int(time.time()))

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """An answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage.to_json()}

    def opening(self) -> dict[str, Any] | None:
        """The chunk before the first text; plain completions have none."""
        return (
            self._chunk({"delta": {"role": "assistant", "content": "", "refusal": None}}, None) if self.chat else None
        )

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk with text."""
        return self._chunk({"delta": {"content": text}} if self.chat else {"text": text}, None)

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        """The chunk that says why the text ends."""
        return self._chunk({"delta": {}} if self.chat else {"text": ""}, reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, if the client asked for it."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage.to_json()}

    def aside(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of ours: a chunk without choices, so that clients which take every event for a chunk go on."""
        return {**self._head("chat.completion.chunk"), "choices": [], "lynx": {"type": kind, **fields}}

    def _chunk(self, content: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _head(self, chat_object: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": chat_object if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def model_entry(model: ServedModel) -> dict[str, Any]:
    """An entry of /v1/models."""
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "lynx_net"}


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event (WHATWG HTML, section 9.2)."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
