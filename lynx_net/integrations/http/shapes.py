"""What clients ask for: the bodies of OpenAI's completion and chat requests, checked.

Reference: the API's description of "Create completion" and "Create chat completion". A field that this server cannot
honour is refused by name, unless its value is the one that changes nothing: what a client asks for is never silently
left out.

One field is not of that API: `lynx`, an object.

    lynx.drafts    true: a streamed answer also tells of drafts (docs/http.md); default false
    lynx.timings   true: the answer says how it came about, under `lynx`; default false
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any, Literal

from lynx_net.integrations.http.errors import bad_request

__all__ = ["CompletionRequest", "parse_chat", "parse_completion"]

MAX_STOPS = 4
COMPLETION_DEFAULT_TOKENS = 16
"""The API's own default of `max_tokens` for plain completions."""

# Accepted, since they say nothing about the answer.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_COMMON = {"model", "stream", "stream_options", "temperature", "seed", "stop", "max_tokens", "lynx"}
# Refused unless they have the value that changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
}
_NEUTRAL_COMPLETION = {**_NEUTRAL, "best_of": (1,), "echo": (False,), "suffix": ("",)}
_NEUTRAL_CHAT = {
    **_NEUTRAL,
    "top_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One request, of either endpoint.

    Attributes:
        chat: it came to /v1/chat/completions.
        model: as the client named it.
        prompt: text or token ids; None for a chat.
        messages: of a chat: "role" and "content", both text.
        max_tokens: of the answer; None: as many as fit.
        temperature, seed: how tokens are drawn; a request without a seed gets a random one.
        repeatable: tokens are drawn, and the client gave the seed: it wants the same text again. Draws depend on how
            many drafts are made, and that on the network, so such a request has none.
        stop: texts that end the answer and are not part of it.
        stream: answer token by token.
        include_usage: end a streamed answer with a chunk that has the usage.
        drafts, timings: see above.
    """

    chat: bool
    model: str
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] = ()
    max_tokens: int | None
    temperature: float
    seed: int
    repeatable: bool
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    drafts: bool
    timings: bool


def parse_completion(body: Any) -> CompletionRequest:
    """Check the body of a request to /v1/completions.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = _checked_fields(body, _COMMON | {"prompt"}, _NEUTRAL_COMPLETION)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        if any(isinstance(one, str | list) for one in prompt):
            raise bad_request("one prompt a request, not several", "prompt")
        if not all(type(one) is int and one >= 0 for one in prompt):
            raise bad_request("prompt must be a text or a list of token ids", "prompt")
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple):
        raise bad_request("prompt must be a text or a list of token ids", "prompt")
    return CompletionRequest(chat=False, prompt=prompt, **_common(fields, "max_tokens", COMPLETION_DEFAULT_TOKENS))


def parse_chat(body: Any) -> CompletionRequest:
    """Check the body of a request to /v1/chat/completions.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = _checked_fields(body, _COMMON | {"messages", "max_completion_tokens"}, _NEUTRAL_CHAT)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list with at least one message", "messages")
    limit = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    return CompletionRequest(
        chat=True,
        messages=tuple(_message(number, one) for number, one in enumerate(messages)),
        **_common(fields, limit, None),
    )


def _checked_fields(body: Any, known: set[str], neutral: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    for name, value in body.items():
        if name in neutral:
            if value is not None and not any(_same(value, one) for one in neutral[name]):
                raise bad_request(f"{name}={value!r} is not supported by this server", name, "unsupported_value")
        elif name not in known | _IGNORED:
            raise bad_request(f"unknown field: {name}", name, "unknown_field")
    return {name: value for name, value in body.items() if name in known}


def _same(value: Any, other: Any) -> bool:
    """Equal, and both truth values or neither: `logprobs` 0 asks for some, False for none."""
    return bool(value == other) and (type(value) is bool) == (type(other) is bool)


def _common(fields: dict[str, Any], limit: str, default_tokens: int | None) -> dict[str, Any]:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("model must be the name of a model", "model")
    max_tokens = fields.get(limit)
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise bad_request(f"{limit} must be a whole number, 1 or more", limit)
    temperature = fields.get("temperature")
    temperature = 1.0 if temperature is None else temperature
    if type(temperature) not in (int, float) or not math.isfinite(temperature) or not 0 <= temperature <= 2:
        raise bad_request("temperature must be between 0 and 2", "temperature")
    seed = fields.get("seed")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
        raise bad_request("seed must be a whole number of 64 bits", "seed")
    stream = _flag(fields, "stream")
    options = _object(fields, "stream_options", {"include_usage"})
    if options and not stream:
        raise bad_request("stream_options need stream=true", "stream_options")
    lynx = _object(fields, "lynx", {"drafts", "timings"})
    drafts = _flag(lynx, "drafts", "lynx.")
    if drafts and not stream:
        raise bad_request("lynx.drafts needs stream=true", "lynx.drafts")
    return {
        "model": model,
        "max_tokens": default_tokens if max_tokens is None else max_tokens,
        "temperature": float(temperature),
        "repeatable": seed is not None and temperature > 0,
        "seed": secrets.randbits(63) if seed is None else seed % 2**64,
        "stop": _stops(fields.get("stop")),
        "stream": stream,
        "include_usage": _flag(options, "include_usage", "stream_options."),
        "drafts": drafts,
        "timings": _flag(lynx, "timings", "lynx."),
    }


def _flag(fields: dict[str, Any], name: str, path: str = "") -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise bad_request(f"{path}{name} must be true or false", path + name)
    return bool(value)


def _object(fields: dict[str, Any], name: str, known: set[str]) -> dict[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be an object", name)
    for key in value:
        if key not in known:
            raise bad_request(f"unknown field: {name}.{key}", f"{name}.{key}", "unknown_field")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(one, str) and one for one in stops):
        raise bad_request(f"stop must be a text or a list of up to {MAX_STOPS} texts, none of them empty", "stop")
    return tuple(stops)


_ROLES: tuple[Literal["system", "user", "assistant"], ...] = ("system", "user", "assistant")


def _message(number: int, message: Any) -> dict[str, str]:
    path = f"messages[{number}]"
    if not isinstance(message, dict):
        raise bad_request(f"{path} must be an object", path)
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise bad_request(f"{path}.role must be system, developer, user or assistant", f"{path}.role")
    content = message.get("content")
    if isinstance(content, list):
        parts = []
        for one in content:
            if not (isinstance(one, dict) and one.get("type") == "text" and isinstance(one.get("text"), str)):
                raise bad_request(f"{path}.content: only parts of the type text are supported", f"{path}.content")
            parts.append(one["text"])
        content = "".join(parts)
    if not isinstance(content, str):
        raise bad_request(f"{path}.content must be a text", f"{path}.content")
    if message.get("tool_calls"):
        raise bad_request(f"{path}.tool_calls: tools are not supported", f"{path}.tool_calls")
    return {"role": role, "content": content}
