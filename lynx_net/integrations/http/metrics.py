"""Metrics of the servers, beside those of their links; docs/operations.md says what each of them means."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from lynx_net.observe import Metrics
from lynx_net.observe.prometheus import Histogram, Labels, Metric, Values, exposition

if TYPE_CHECKING:
    from lynx_net.integrations.http.admission import Admission
    from lynx_net.integrations.http.generation import Finished
    from lynx_net.integrations.http.steps import StepThread
    from lynx_net.integrations.http.store_link import StoreLink
    from lynx_net.integrations.http.storing import StoreWriter

__all__ = ["HTTP_METRICS", "ServerMetrics"]

HTTP_METRICS: tuple[Metric, ...] = (
    Metric(
        "lynx_net_http_requests_total",
        "counter",
        ("endpoint", "status"),
        "Requests answered, by status: of HTTP, 499 if the client left, the error's if it came in mid-stream.",
    ),
    Metric("lynx_net_http_request_seconds", "histogram", ("endpoint",), "From a request to the end of its answer."),
    Metric("lynx_net_http_requests_running", "gauge", (), "Requests that have a place."),
    Metric("lynx_net_http_requests_queued", "gauge", (), "Requests that wait for a place."),
    Metric("lynx_net_http_queue_seconds", "histogram", (), "How long requests waited for a place."),
    Metric("lynx_net_http_ttft_seconds", "histogram", (), "From a request to its first final token."),
    Metric(
        "lynx_net_http_token_seconds",
        "histogram",
        (),
        "Mean time of the further tokens of an answer, one an answer.",
    ),
    Metric("lynx_net_http_prefill_seconds", "histogram", (), "Forward passes over prompts."),
    Metric("lynx_net_http_prompt_tokens_total", "counter", (), "Tokens of prompts."),
    Metric("lynx_net_http_completion_tokens_total", "counter", (), "Tokens of finished answers."),
    Metric("lynx_net_http_drafts_total", "counter", ("outcome",), "Drafts of finished answers: accepted or retracted."),
    Metric("lynx_net_http_model_seconds_total", "counter", (), "Time that the model's thread has computed."),
    Metric("lynx_net_http_model_steps_total", "counter", (), "Forward passes."),
    Metric("lynx_net_http_model_steps_waiting", "gauge", (), "Forward passes that wait for the model's thread."),
    Metric("lynx_net_http_caches", "gauge", (), "Caches in the memory of the decode server."),
    Metric(
        "lynx_net_http_store_lookups_total",
        "counter",
        ("outcome",),
        "Requests that looked for a prefix in the store: hit, miss, down, slow or failed.",
    ),
    Metric(
        "lynx_net_http_store_answer_seconds", "histogram", (), "From asking the store to its answer, or to giving up."
    ),
    Metric("lynx_net_http_store_tokens_total", "counter", (), "Tokens of prompts whose cache came from the store."),
    Metric(
        "lynx_net_http_store_puts_total",
        "counter",
        ("outcome",),
        "Computed caches, by what became of them at the store: stored, known, dropped, down or failed.",
    ),
    Metric("lynx_net_http_store_puts_waiting", "gauge", (), "Computed caches that wait for the store or go there."),
    Metric("lynx_net_http_store_up", "gauge", (), "1 if there is a link to the store."),
    Metric("lynx_net_http_tasks", "gauge", (), "Tasks of the event loop."),
    Metric("process_resident_memory_bytes", "gauge", (), "Resident memory of the process; Linux."),
    Metric("process_open_fds", "gauge", (), "Open file descriptors of the process; Linux."),
    Metric("process_threads", "gauge", (), "Threads of the process; Linux."),
)


class ServerMetrics:
    """Counts what a server does. For one event loop.

    Attributes:
        links: an observer to give to `connect` and `serve`.
        steps: the model's thread, once there is one.
        caches: those of the decode server that are not yet freed.
        store, writer: the link to the store, if one is configured, and what writes to it.
    """

    def __init__(self, admission: Admission) -> None:
        self.links = Metrics()
        self.steps: StepThread | None = None
        self.caches: weakref.WeakSet[object] = weakref.WeakSet()
        self.store: StoreLink | None = None
        self.writer: StoreWriter | None = None
        self._admission = admission
        self._values: Values = {metric.name: defaultdict(float) for metric in HTTP_METRICS}
        self._histograms: dict[str, dict[Labels, Histogram]] = {
            metric.name: {} for metric in HTTP_METRICS if metric.kind == "histogram"
        }

    def answered(self, endpoint: str, status: int, took_s: float) -> None:
        """A request has its answer, or nobody waits for one any more."""
        about = ("endpoint", endpoint)
        self._values["lynx_net_http_requests_total"][about, ("status", str(status))] += 1
        self._observe("lynx_net_http_request_seconds", took_s, (about,))

    def waited(self, queue_s: float) -> None:
        """A request has its place."""
        self._observe("lynx_net_http_queue_seconds", queue_s)

    def prefilled(self, tokens: int, prefill_s: float) -> None:
        """The prefill server has computed a cache."""
        self._add("lynx_net_http_prompt_tokens_total", tokens)
        self._observe("lynx_net_http_prefill_seconds", prefill_s)

    def finished(self, prompt_tokens: int, answer: Finished) -> None:
        """The decode server has given an answer."""
        self._add("lynx_net_http_prompt_tokens_total", prompt_tokens)
        self._add("lynx_net_http_completion_tokens_total", answer.completion_tokens)
        self._add("lynx_net_http_drafts_total", answer.accepted, (("outcome", "accepted"),))
        self._add("lynx_net_http_drafts_total", answer.drafted - answer.accepted, (("outcome", "retracted"),))
        self._observe("lynx_net_http_ttft_seconds", answer.ttft_s)
        if answer.completion_tokens > 1:
            further_s = (answer.total_s - answer.ttft_s) / (answer.completion_tokens - 1)
            self._observe("lynx_net_http_token_seconds", further_s)

    def looked_up(self, outcome: str, tokens: int) -> None:
        """A request has its prefix of so many tokens from the store, or goes on without it."""
        self._add("lynx_net_http_store_lookups_total", 1, (("outcome", outcome),))
        self._add("lynx_net_http_store_tokens_total", tokens)

    def store_answered(self, took_s: float) -> None:
        """The store has said what it has, or was given up."""
        self._observe("lynx_net_http_store_answer_seconds", took_s)

    def put(self, outcome: str) -> None:
        """A computed cache is in the store, or will not be."""
        self._add("lynx_net_http_store_puts_total", 1, (("outcome", outcome),))

    def text(self) -> str:
        """Everything, as `observe.prometheus.CONTENT_TYPE` says."""
        now = {
            "lynx_net_http_requests_running": self._admission.running,
            "lynx_net_http_requests_queued": self._admission.queued,
            "lynx_net_http_caches": len(self.caches),
            "lynx_net_http_tasks": len(asyncio.all_tasks()),
            "lynx_net_http_store_up": self.store is not None and self.store.link is not None,
            "lynx_net_http_store_puts_waiting": 0 if self.writer is None else self.writer.waiting,
            **_process(),
        }
        if self.steps is not None:
            now["lynx_net_http_model_seconds_total"] = self.steps.busy_s
            now["lynx_net_http_model_steps_total"] = self.steps.steps
            now["lynx_net_http_model_steps_waiting"] = self.steps.waiting
        values = self._values | {name: defaultdict(float, {(): float(value)}) for name, value in now.items()}
        return exposition(HTTP_METRICS, values, self._histograms) + self.links.text()

    def _add(self, name: str, count: float, labels: Labels = ()) -> None:
        self._values[name][labels] += count

    def _observe(self, name: str, value_s: float, labels: Labels = ()) -> None:
        self._histograms[name].setdefault(labels, Histogram()).add(value_s)


def _process() -> dict[str, float]:
    """What the kernel says of this process, where it does."""
    folder = Path("/proc/self")
    if not folder.is_dir():
        return {}
    pages = int((folder / "statm").read_text().split()[1])
    return {
        "process_resident_memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "process_open_fds": len(os.listdir(folder / "fd")) - 1,  # one is the listing's own
        "process_threads": len(os.listdir(folder / "task")),
    }
