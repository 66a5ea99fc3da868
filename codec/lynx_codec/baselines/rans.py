"""A range coder with static tables (range asymmetric numeral systems; Duda 2013, section 3): plain integer loops.

As they stand, and with lists, the two functions are the reference; after numba (rans_compiled.py), and with arrays,
they are the compiled coder. So both have the same bytes. No intermediate value exceeds 48 bits.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ALPHABET", "BAD", "STATE_WORDS", "TOTAL", "TOTAL_BITS", "decode_words", "encode_words"]

ALPHABET = 256
"""Symbols of a table."""

TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
"""Sum of the frequencies of a table."""

STATE_WORDS = 3
"""16-bit words of the state, which lies in front of the others."""

LOW = 1 << 31
"""The state stays between LOW and LOW << 16 after every symbol."""

FULL_SHIFT = 31 - TOTAL_BITS + 16
WORD = 0xFFFF
BAD = -1


def encode_words(symbols: Any, tables: Any, frequencies: Any, starts: Any, words: Any) -> int:
    """Code `symbols`, whole tokens [token][channel], into the end of `words`; the index of the first word, or BAD.

    `tables` names the table of each channel; `frequencies` and `starts` are [table][symbol], and every symbol has a
    frequency above 0. The coder goes from the last symbol to the first. BAD: there are not enough words.
    """
    state = LOW
    at = len(words)
    channel = len(tables) - 1
    for i in range(len(symbols) - 1, -1, -1):
        entry = tables[channel] * ALPHABET + symbols[i]
        channel = channel - 1 if channel else len(tables) - 1
        frequency = frequencies[entry]
        if state >= frequency << FULL_SHIFT:
            if at == STATE_WORDS:
                return BAD
            at -= 1
            words[at] = state & WORD
            state >>= 16
        state = ((state // frequency) << TOTAL_BITS) + state % frequency + starts[entry]
    if at < STATE_WORDS:
        return BAD
    for _ in range(STATE_WORDS):
        at -= 1
        words[at] = state & WORD
        state >>= 16
    return at


def decode_words(words: Any, tables: Any, frequencies: Any, starts: Any, slots: Any, symbols: Any) -> int:
    """Fill `symbols` from `words`; 0, or BAD if these are not what `encode_words` wrote for that many symbols.

    `slots` is [table][TOTAL]: the symbol of each position in the range of a table.
    """
    if len(words) < STATE_WORDS:
        return BAD
    state = (words[0] << 32) | (words[1] << 16) | words[2]
    if state < LOW or state >= LOW << 16:
        return BAD
    at = STATE_WORDS
    channel = 0
    for i in range(len(symbols)):
        table = tables[channel]
        channel = channel + 1 if channel + 1 < len(tables) else 0
        slot = state & (TOTAL - 1)
        symbol = slots[table * TOTAL + slot]
        entry = table * ALPHABET + symbol
        state = frequencies[entry] * (state >> TOTAL_BITS) + slot - starts[entry]
        if state < LOW:
            if at == len(words):
                return BAD
            state = (state << 16) | words[at]
            at += 1
        symbols[i] = symbol
    return 0 if state == LOW and at == len(words) else BAD
