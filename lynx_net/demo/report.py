"""The results as styled lines: a table, the time line of one transfer, and its text with every draft in view.

A line is a list of spans (text, style), so that the same lines go to a terminal in colour and to a
pipe as plain text. Where colour says something, the plain text says it too: accepted drafts stand in
[brackets], retracted ones between ~tildes~.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from lynx_net.demo.options import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lynx_net.demo.options import DemoOptions
    from lynx_net.demo.results import Agreement, Piece, TransferResult

__all__ = ["Line", "Span", "marked_text", "plain_text", "report_lines"]

Span = tuple[str, str]
Line = list[Span]

_MARKS = {"commit": ("", ""), "accepted": ("[", "]"), "draft": ("{", "}"), "retracted": ("~", "~")}
_CHART_WIDTH = 56


def plain_text(line: Line) -> str:
    """A line without its styles."""
    return "".join(text for text, _ in line)


def report_lines(
    results: Sequence[TransferResult], options: DemoOptions, detokenize: Callable[[Sequence[int]], str]
) -> list[Line]:
    """The whole report."""
    lines = [[], *_table(results, options), []]
    shown = max((result for result in results if result.codec in ("lynx", DEFAULT)), key=_is_default, default=None)
    if shown is not None:
        lines += [*_timeline(shown), [], *marked_text(shown.pieces, detokenize)]
    return lines


def _is_default(result: TransferResult) -> bool:
    return result.codec == DEFAULT


def _table(results: Sequence[TransferResult], options: DemoOptions) -> list[Line]:
    """One row a transfer."""
    nth = min(options.new_tokens, 32)
    head = ("transfer", "bits/value", "MB sent", "TTFT", f"TT{nth}T", "drafts", "accepted", "= Q_full", "= bf16")
    rows: list[tuple[str, ...]] = [head]
    for result in results:
        speculative = result.residual_ready_s is not None
        rows.append(
            (
                result.codec,
                f"{result.bits_per_value:.3f}",
                f"{result.bytes_sent / 1e6:.2f}",
                f"{result.ttft_s:.2f} s",
                f"{max(result.token_times_s[:nth]):.2f} s",
                str(result.drafted) if speculative else "-",
                str(result.accepted) if speculative else "-",
                _agreement_cell(result.versus_qfull),
                _agreement_cell(result.versus_bf16),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines: list[Line] = []
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append([("  ".join(cells), "head" if number == 0 else "")])
    notes = (
        "Times count from the start of the transfer, with the prefill done. The two last columns: tokens equal to",
        "plain decoding on Q_full (its own, else that of lynx) and on the bf16 transfer, @ the first that differs,",
        "counted from 0.",
    )
    return lines + [[(note, "dim")] for note in notes]


def _agreement_cell(compared: Agreement | None) -> str:
    """For example "32/32", or "12/32 @3" where the first difference is at position 3."""
    if compared is None:
        return "-"
    where = "" if compared.first_difference is None else f" @{compared.first_difference}"
    return f"{compared.equal}/{compared.compared}{where}"


def _timeline(result: TransferResult) -> list[Line]:
    """The moments of a transfer and a bar chart of what ran beside what."""
    moments: list[tuple[str, float | None]] = [
        ("anchor ready", result.anchor_ready_s),
        ("first token", result.ttft_s),
        ("residual ready", result.residual_ready_s),
        ("verified", result.verified_s),
        (f"token {len(result.tokens)}", max(result.token_times_s)),
    ]
    known = [(name, at_s) for name, at_s in moments if at_s is not None]
    told = ", ".join(f"{name} {at_s:.2f} s" for name, at_s in known)
    lines: list[Line] = [[(f"{result.codec}: ", "head"), (told, "")]]
    end_s = max(at_s for _, at_s in known)
    residual_s = result.residual_ready_s if result.residual_ready_s is not None else result.anchor_ready_s
    drafts = [piece.at_s for piece in result.pieces if piece.kind in ("accepted", "retracted", "draft")]
    spans = [("anchor", 0.0, result.anchor_ready_s, "head"), ("residual", result.anchor_ready_s, residual_s, "head")]
    if drafts:
        spans.append(("drafting", result.anchor_ready_s, max(drafts), "draft"))
    if result.verified_s is not None:
        spans.append(("verifying", max(residual_s, max(drafts, default=0.0)), result.verified_s, "good"))
    spans.append(("decoding", result.verified_s or residual_s, end_s, "commit"))
    for name, start_s, stop_s, style in spans:
        start = round(start_s / end_s * _CHART_WIDTH)
        stop = max(round(stop_s / end_s * _CHART_WIDTH), start + 1)
        lines.append([(f"  {name:<10}|{' ' * start}", ""), ("#" * (stop - start), style)])
    return lines


def marked_text(pieces: Sequence[Piece], detokenize: Callable[[Sequence[int]], str]) -> list[Line]:
    """The text with accepted drafts, retracted drafts and commits told apart."""
    legend: Line = [("text: ", "head"), ("commits plain, ", "commit"), ("[accepted drafts]", "accepted"), (", ", "")]
    legend.append(("~retracted drafts~", "retracted"))
    body: Line = []
    for kind, run in groupby(pieces, key=lambda piece: piece.kind):
        left, right = _MARKS[kind]
        body.append((f"{left}{detokenize([piece.token for piece in run])}{right}", kind))
    return [legend, *_lines_of(body)]


def _lines_of(spans: Line) -> list[Line]:
    """Break spans at the newlines in their text."""
    lines: list[Line] = [[]]
    for text, style in spans:
        first, *others = text.split("\n")
        lines[-1].append((first, style))
        lines += [[(part, style)] for part in others]
    return lines
