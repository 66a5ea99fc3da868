"""What requests may say."""

from __future__ import annotations

import pytest

from lynx_net.integrations.http.errors import ApiError
from lynx_net.integrations.http.shapes import parse_chat, parse_completion

PLAIN = {"model": "m", "prompt": "p"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "c"}]}


def test_defaults_are_those_of_the_api():
    plain, chat = parse_completion(PLAIN), parse_chat(CHAT)
    assert (plain.max_tokens, chat.max_tokens) == (16, None)
    assert plain.temperature == chat.temperature == 1.0
    assert plain.seed != parse_completion(PLAIN).seed
    assert not any((plain.stream, plain.drafts, plain.include_usage, plain.timings))


def test_drawing_with_a_seed_is_to_be_repeatable():
    for fields, repeatable in (
        ({"seed": 5}, True),
        ({"seed": 5, "temperature": 0}, False),
        ({"temperature": 0.5}, False),
    ):
        assert parse_completion({**PLAIN, **fields}).repeatable is repeatable


def test_null_is_the_same_as_absent():
    nothing = dict.fromkeys(["stream", "stop", "temperature", "max_tokens", "logprobs", "n", "stream_options", "lynx"])
    assert parse_completion({**PLAIN, **nothing, "seed": 1}) == parse_completion({**PLAIN, "seed": 1})


def test_what_says_nothing_about_the_answer_is_accepted():
    neutral = {"n": 1, "top_p": 1.0, "logit_bias": {}, "presence_penalty": 0.0, "logprobs": False, "user": "ada"}
    parse_completion({**PLAIN, **neutral, "best_of": 1, "echo": False, "suffix": ""})
    parse_chat({**CHAT, **neutral, "response_format": {"type": "text"}, "tools": [], "metadata": {"a": "b"}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("top_p", 0.9),
        ("logprobs", True),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.1),
        ("temperature", -1),
        ("temperature", 2.1),
        ("temperature", True),
        ("temperature", float("nan")),
        ("seed", 0.5),
        ("seed", 2**64),
        ("stop", ["a"] * 5),
        ("stop", ""),
        ("stop", 5),
        ("stream", 1),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("model", ""),
        ("model", None),
        ("top_k", 5),
        ("stream_options", {"include_usage": True}),
        ("lynx", 1),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name, value):
    for parse, body in ((parse_completion, PLAIN), (parse_chat, CHAT)):
        with pytest.raises(ApiError) as refusal:
            parse({**body, name: value})
        assert refusal.value.status == 400
        assert refusal.value.param == name
        assert name in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 0}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"lynx": {"drafts": True}}, "lynx.drafts"),
        ({"lynx": {"draft": True}}, "lynx.draft"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_completions_refuse(fields, param):
    with pytest.raises(ApiError) as refusal:
        parse_completion({**PLAIN, **fields})
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)
def test_chats_refuse(fields, param):
    with pytest.raises(ApiError) as refusal:
        parse_chat({**CHAT, **fields})
    assert refusal.value.param == param


def test_prompts_and_messages_in_all_their_forms():
    assert parse_completion({**PLAIN, "prompt": ["only one"]}).prompt == "only one"
    assert parse_completion({**PLAIN, "prompt": [[1, 2]]}).prompt == (1, 2)
    assert parse_completion({**PLAIN, "stop": "end"}).stop == ("end",)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert parse_chat({**CHAT, "messages": messages}).messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
    )
    both = parse_chat({**CHAT, "max_tokens": 5, "max_completion_tokens": 7})
    assert both.max_tokens == 7


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_a_body_must_be_an_object(body):
    with pytest.raises(ApiError):
        parse_completion(body)
