"""Text in pieces is the text as a whole, up to a stop text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_net.integrations.http.text import HELD_TOKENS, TextStream, TokenTexts


def decode(tokens):
    """A byte-level tokenizer: each token is a byte."""
    return bytes(tokens).decode("utf-8", "replace")


def pieces_of(stream, groups):
    return [*(stream.push(group) for group in groups), stream.finish()]


def grouped(draw, tokens):
    groups, at = [], 0
    while at < len(tokens):
        size = draw(st.integers(1, 5))
        groups.append(tokens[at : at + size])
        at += size
    return groups


@given(st.data(), st.text(max_size=40), st.text(max_size=8))
def test_characters_come_whole_and_none_is_lost(data, text, prompt):
    tokens = list(text.encode())
    stream = TextStream(decode, list(prompt.encode()))
    pieces = pieces_of(stream, grouped(data.draw, tokens))
    context = decode(list(prompt.encode())[-5:])  # a prompt may be cut inside a character
    if "\ufffd" not in context:
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


@given(st.data(), st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_first_stop_text_ends_it(data, text, stops):
    stream = TextStream(decode, [], stops)
    pieces = pieces_of(stream, [[token] for token in text.encode()])
    found = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not found:
        assert "".join(pieces) == text
        assert not stream.stopped
        return
    seen = text[: found[0]]
    expected = seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert "".join(pieces) == expected
    assert stream.stopped
    assert stream.push([65]) == stream.finish() == ""


def test_what_may_become_a_stop_text_is_held_back():
    stream = TextStream(decode, [], ["END"])
    assert stream.push(b"xE") == "x"
    assert stream.push(b"N") == ""
    assert stream.push(b"x") == "ENx"
    assert stream.push(b"EN") == ""
    assert stream.finish() == "EN"


def test_an_unfinished_character_waits_but_not_for_ever():
    stream = TextStream(decode, [])
    assert stream.push([0xE2]) == ""
    assert stream.push([0x82]) == ""
    assert stream.push([0xAC]) == "€"
    assert stream.push([0xFF] * HELD_TOKENS) == ""
    assert stream.push([0xFF]) == "\ufffd" * (HELD_TOKENS + 1)
    assert stream.push([0xE2]) == ""
    assert stream.finish() == "\ufffd"


def test_the_prompt_gives_the_first_token_its_space():
    words = {0: "Once", 1: "▁upon", 2: "▁a"}

    def strip_first(tokens):
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    assert strip_first([1]) == "upon"
    stream = TextStream(strip_first, [0])
    assert stream.push([1]) == " upon"
    assert stream.push([2]) == " a"


@pytest.mark.parametrize("count", [1, 3, 9])
def test_tokens_without_text_are_nothing(count):
    stream = TextStream(lambda tokens: "", [5])
    assert stream.push([7] * count) == stream.finish() == ""


@given(st.data(), st.text(min_size=1, max_size=30))
def test_texts_of_tokens_make_up_the_text_whatever_was_drafted(data, text):
    tokens, texts = list(text.encode()), TokenTexts(decode, [65])
    shown, at = "", 0
    while at < len(tokens):
        kept = tokens[at : at + data.draw(st.integers(0, 4))]
        wrong = data.draw(st.lists(st.integers(0, 255), max_size=3))
        drafted = [texts.draft(token) for token in (*kept, *wrong)]
        texts.retract(len(wrong))
        final = tokens[at : at + len(kept) + 1]
        committed = texts.commit(final)
        assert committed[: len(kept)] == drafted[: len(kept)]
        shown, at = shown + "".join(committed), at + len(final)
    assert shown == text


def test_drafts_go_on_behind_those_that_are_left():
    texts = TokenTexts(decode, [])
    first, *rest = "é!".encode()
    assert [texts.draft(token) for token in (first, 65, 66)] == ["", "\ufffdA", "B"]
    texts.retract(2)
    assert [texts.draft(token) for token in rest] == ["é", "!"]
