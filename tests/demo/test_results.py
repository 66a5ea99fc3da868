"""What is computed from a transfer: times, bits, agreement, the history of the text, the report, the JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from lynx_net.demo.experiment import compare, fold
from lynx_net.demo.options import DemoOptions
from lynx_net.demo.report import marked_text, plain_text, report_lines
from lynx_net.demo.results import Piece, TransferResult, agreement
from lynx_net.speculation import Commit, Draft, Retract

if TYPE_CHECKING:
    from collections.abc import Sequence


def words(tokens: Sequence[int]) -> str:
    return "".join(f" t{token}" for token in tokens)


def made(codec: str, tokens: list[int], **changes: object) -> TransferResult:
    fields: dict[str, object] = {
        "codec": codec,
        "values": 1000,
        "bytes_sent": 1125,
        "stream_bytes": [600, 525] if codec == "lynx" else [1125],
        "tokens": tokens,
        "token_times_s": [1.0 + 0.1 * at for at in range(len(tokens))],
        "drafted": 4 if codec == "lynx" else 0,
        "accepted": 3 if codec == "lynx" else 0,
        "anchor_ready_s": 0.9,
        "residual_ready_s": 2.0 if codec == "lynx" else None,
        "verified_s": 2.2 if codec == "lynx" else None,
        "text": words(tokens),
    }
    return TransferResult(**(fields | changes))  # type: ignore[arg-type]  # the mix of types is the point


def test_agreement_counts_positions_and_finds_the_first_difference() -> None:
    compared = agreement([1, 2, 3, 4], [1, 9, 3, 8])
    assert (compared.equal, compared.compared, compared.first_difference) == (2, 4, 1)
    assert compared.share == 0.5
    assert agreement([1, 2], [1, 2]).first_difference is None
    assert agreement([], []).share == 1.0


def test_figures_of_a_transfer() -> None:
    result = made("int8", list(range(32)))
    assert result.bits_per_value == 9.0
    assert result.ttft_s == 1.0
    assert result.tt32t_s == pytest.approx(4.1)
    assert made("int8", list(range(31))).tt32t_s is None


def test_the_32nd_token_is_not_there_before_the_31st() -> None:
    times_s = [1.0] * 30 + [5.0, 4.0]
    assert made("lynx", list(range(32)), token_times_s=times_s).tt32t_s == 5.0


def test_comparison_is_with_the_references() -> None:
    results = [made("bf16", [1, 2, 3]), made("int4", [1, 5, 3]), made("lynx", [1, 2, 4])]
    compare(results, {"bf16": [1, 2, 3], "int4": [1, 5, 3], "lynx": [1, 2, 4]})
    assert [result.matches_qfull for result in results] == [False, False, True]
    assert results[1].versus_bf16 == agreement([1, 5, 3], [1, 2, 3])
    compare(results, {"bf16": None, "lynx": None})
    assert [result.matches_qfull for result in results] == [None, None, None]


def test_folding_events_gives_every_token_its_fate() -> None:
    pieces: list[Piece] = []
    for event in [Draft(1, 10.5), Draft(2, 11.0), Draft(3, 11.5), Retract(1, 12.0), Commit((1, 2, 7), 2, 12.0)]:
        fold(pieces, event, started_s=10.0)
    fold(pieces, Commit((8,), 0, 13.0), started_s=10.0)
    assert [(piece.kind, piece.token, piece.at_s) for piece in pieces] == [
        ("accepted", 1, 0.5),
        ("accepted", 2, 1.0),
        ("retracted", 3, 1.5),
        ("commit", 7, 2.0),
        ("commit", 8, 3.0),
    ]


def test_marked_text_tells_drafts_from_commits_without_colour() -> None:
    pieces = [Piece("commit", 0, 0.0), Piece("accepted", 1, 0.1), Piece("accepted", 2, 0.2), Piece("retracted", 3, 0.3)]
    legend, body = (plain_text(line) for line in marked_text(pieces, words))
    assert "[accepted drafts]" in legend
    assert body == " t0[ t1 t2]~ t3~"


def test_report_has_a_row_for_each_transfer_and_the_time_line_of_lynx() -> None:
    tokens = list(range(32))
    pieces = [Piece("accepted", 1, 1.5), Piece("retracted", 2, 1.9), Piece("commit", 3, 2.2)]
    results = [made("bf16", tokens), made("lynx", tokens, pieces=pieces)]
    compare(results, {"bf16": tokens, "lynx": [0, *tokens[:-1]]})
    text = "\n".join(plain_text(line) for line in report_lines(results, DemoOptions(), words))
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(("bf16", "lynx "))}
    assert rows["bf16"][1:] == ["9.000", "0.00", "1.00", "s", "4.10", "s", "-", "-", "1/32", "@1", "32/32"]
    assert rows["lynx"][-5:] == ["4", "3", "1/32", "@1", "32/32"]
    assert "anchor ready 0.90 s, first token 1.00 s, residual ready 2.00 s, verified 2.20 s, token 32 4.10 s" in text


def test_json_has_the_promised_fields() -> None:
    results = [made("lynx", [1, 2, 3], pieces=[Piece("commit", 1, 1.0)])]
    compare(results, {"lynx": [1, 2, 9]})
    data = json.loads(json.dumps(results[0].to_json()))
    promised = {"codec", "bits_per_value", "bytes_sent", "ttft_s", "tt32t_s", "drafted", "accepted", "tokens"}
    promised |= {"matches_qfull", "anchor_ready_s", "residual_ready_s", "verified_s", "text"}
    assert promised <= set(data)
    assert data["tokens"] == [1, 2, 3]
    assert data["tt32t_s"] is None
    assert data["matches_qfull"] is False
    assert data["agreement_qfull"] == pytest.approx(2 / 3)
    assert data["first_difference_qfull"] == 2
    assert data["agreement_bf16"] is None
