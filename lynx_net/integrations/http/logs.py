"""The log as JSON, one object a line, each with the id of the request it is about."""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lynx_net.integrations.http.config import LogConfig

__all__ = ["JsonFormatter", "request_id", "set_up_logging"]

request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
"""Of the request that the current task serves."""

_TEXT = "%(asctime)s %(levelname)s %(name)s %(request)s%(message)s"


class JsonFormatter(logging.Formatter):
    """One object a record: time (ISO 8601, UTC), level, logger, message, and request if it is about one.

    `extra={"fields": {...}}` adds further ones.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        made = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": made.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        about = request_id.get()
        if about is not None:
            line["request"] = about
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about = request_id.get()
        record.request = "" if about is None else f"[{about}] "
        text = super().format(record)
        fields = getattr(record, "fields", {})
        return text + "".join(f" {name}={value}" for name, value in fields.items())


def set_up_logging(config: LogConfig) -> None:
    """Write the log to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format == "json" else _TextFormatter(_TEXT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("lynx_net").setLevel(config.level.upper())
