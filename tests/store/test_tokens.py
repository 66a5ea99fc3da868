"""Prompts as chains of digests, and the longest stored prefix of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_net.errors import LocalProtocolError
from lynx_net.store import TokenPath, stored_as, wanted
from lynx_net.store.index import COMPARED, PrefixIndex
from lynx_net.store.messages import FIELD, Wanted, path_from
from lynx_net.store.tokens import BLOCK_TOKENS, DIGEST_BYTES, MAX_WHOLE_TOKENS

# Prompts that share much: a number of blocks of a few kinds, then single tokens of a few kinds.
PROMPTS = st.builds(
    lambda blocks, rest: [token for block in blocks for token in [block] * BLOCK_TOKENS] + rest,
    st.lists(st.integers(0, 1), max_size=4),
    st.lists(st.integers(0, 1), max_size=BLOCK_TOKENS + 3),
).filter(bool)


def common(left: list[int], right: list[int]) -> int:
    length = min(len(left), len(right))
    return next((at for at in range(length) if left[at] != right[at]), length)


@given(PROMPTS, PROMPTS)
@settings(max_examples=200, deadline=None)
def test_common_tokens_are_counted_as_in_the_lists(left: list[int], right: list[int]) -> None:
    ours, theirs = TokenPath.of("m", left), TokenPath.of("m", right)
    assert ours.common_tokens(theirs) == common(left, right)
    assert ours.common_tokens(TokenPath.of("n", right)) == 0
    assert (ours.end == theirs.end) == (left == right)
    # Who knows only the chain can tell whole blocks, and the last tokens where both end alike.
    known = ours.short().common_tokens(theirs)
    assert common(left, right) // BLOCK_TOKENS * BLOCK_TOKENS <= known <= common(left, right)
    assert ours.short().end == ours.end


@given(st.lists(PROMPTS, max_size=12, unique_by=tuple), PROMPTS, st.data())
@settings(max_examples=100, deadline=None)
def test_the_longest_prefix_is_found(prompts: list[list[int]], prompt: list[int], data: st.DataObject) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for number, stored in enumerate(prompts):
        index.add(number, TokenPath.of("m", stored))
    for number in sorted(data.draw(st.sets(st.sampled_from(range(len(prompts))))) if prompts else ()):
        index.remove(number)
        prompts[number] = []
    unwanted = data.draw(st.sets(st.integers(0, 12), max_size=3))
    found = index.longest(TokenPath.of("m", prompt), lambda number: number not in unwanted)
    best = max((common(one, prompt) for number, one in enumerate(prompts) if number not in unwanted), default=0)
    reachable = [
        common(one, prompt)
        for number, one in enumerate(prompts)
        if number not in unwanted and (len(one) < BLOCK_TOKENS or common(one, prompt) >= BLOCK_TOKENS)
    ]
    longest = max(reachable, default=0)
    assert (found[0][0] if found else 0) == longest
    # What is not reachable shares less than a block.
    assert best < BLOCK_TOKENS or longest == best
    for tokens, number in found:
        assert tokens == common(prompts[number], prompt)
        assert number not in unwanted
    assert [tokens for tokens, _ in found] == sorted((tokens for tokens, _ in found), reverse=True)
    assert index.longest(TokenPath.of("other", prompt)) == []


def test_nothing_is_left_of_what_was_removed() -> None:
    index: PrefixIndex[int] = PrefixIndex()
    paths = [TokenPath.of("m", range(start, start + 300)) for start in range(5)]
    for number, path in enumerate(paths):
        index.add(number, path)
    for number in range(5):
        index.remove(number)
    assert len(index) == 0
    assert index._by_digest == {}


def test_an_equal_prompt_is_found_among_many_that_differ_in_the_last_block() -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for number in range(5 * COMPARED):
        index.add(number, TokenPath.of("m", [0] * BLOCK_TOKENS + [number, 1]))
    assert index.longest(TokenPath.of("m", [0] * BLOCK_TOKENS + [3, 1]))[0] == (BLOCK_TOKENS + 2, 3)
    assert len(index.longest(TokenPath.of("m", [0] * BLOCK_TOKENS + [3, 2]))) == COMPARED


@pytest.mark.parametrize("count", [1, BLOCK_TOKENS, MAX_WHOLE_TOKENS, MAX_WHOLE_TOKENS + 1, 1_000_000])
def test_what_travels_fits_into_a_control_message(count: int) -> None:
    tokens = np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)
    path = TokenPath.of("m", tokens)
    fields = stored_as("m", tokens)[FIELD]
    assert sum(len(value) for value in fields.values() if isinstance(value, bytes)) < 200_000
    again = path_from(fields)
    assert again.end == path.end
    assert again.chain == path.chain
    asked = Wanted.from_meta(wanted("m", tokens, codec="lynx", least_tokens=7))
    assert asked.path is not None
    assert (asked.path.end, asked.codec, asked.least_tokens) == (path.end, "lynx", 7)


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {"model": "m"},
        {"model": 3, "tokens": b"1234"},
        {"model": "", "tokens": b"1234"},
        {"model": "m" * 1001, "tokens": b"1234"},
        {"model": "m", "tokens": b""},
        {"model": "m", "tokens": b"12345"},
        {"model": "m", "count": 200, "chain": b"", "tail": bytes(4 * 72)},
        {"model": "m", "count": 200, "chain": bytes(DIGEST_BYTES), "tail": bytes(4 * 71)},
        {"model": "m", "count": -1, "chain": b"", "tail": b""},
        {"model": "m", "tokens": b"1234", "codec": 5},
        {"model": "m", "tokens": b"1234", "least_tokens": 1.5},
        {"model": "m", "tokens": b"1234", "least_tokens": True},
        {"key": 7},
    ],
)
def test_nonsense_is_refused(fields: Any) -> None:
    with pytest.raises(LocalProtocolError):
        Wanted.from_meta({FIELD: fields})


@pytest.mark.parametrize("tokens", [[], [-1], [2**32], [1.5], ["a"], [[1]], [None]])
def test_tokens_are_token_ids(tokens: Any) -> None:
    with pytest.raises(LocalProtocolError):
        stored_as("m", tokens)


def test_the_digests_are_those_of_the_document() -> None:
    """Others can compute them: hashlib and struct are all it takes."""
    import hashlib
    import struct

    def digest(*parts: bytes) -> bytes:
        return hashlib.blake2b(b"".join(parts), digest_size=16).digest()

    tokens = list(range(BLOCK_TOKENS + 2))
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    first = digest(digest(b"lynx_net store 1", b"model"), packed[: 4 * BLOCK_TOKENS])
    path = TokenPath.of("model", tokens)
    assert path.chain == first
    assert path.end == digest(first, packed[4 * BLOCK_TOKENS :])
