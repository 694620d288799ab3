"""What is seen of requests from outside: lines of JSON, and spans of OpenTelemetry."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.client.http import Service
from autofit.exceptions import UsageError
from autofit.service import observed
from tests.service.serving import Running

pytestmark = pytest.mark.quick


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The lines that the service logs."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(observed.JsonLines())
    observed.LOG.addHandler(handler)
    observed.LOG.setLevel(logging.INFO)
    yield written
    observed.LOG.removeHandler(handler)
    observed.LOG.setLevel(logging.NOTSET)


def test_a_request_is_a_line_of_json(running: Running, log: io.StringIO) -> None:
    alice = running.user("alice")
    alice.get("/api/searches")
    with pytest.raises(UsageError):
        alice.get("/api/searches/999999")
    with pytest.raises(UsageError):
        Service(running.url, "").get("/api/searches")
    deadline = time.monotonic() + 10
    while log.getvalue().count("\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.01)  # the line comes after the answer
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["status"] for line in lines] == [200, 404, 401]
    first, _, stranger = lines
    assert first["user"].startswith("alice-")
    assert (first["method"], first["path"], first["level"]) == ("GET", "/api/searches", "info")
    assert first["milliseconds"] >= 0
    assert stranger["user"] == ""


def test_an_error_has_its_traceback(log: io.StringIO) -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        observed.LOG.exception("it broke")
    (line,) = log.getvalue().splitlines()
    assert "ValueError: a\nb" in json.loads(line)["traceback"]


def test_without_opentelemetry(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    observed._opentelemetry.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    assert running.user("alice").get("/api/searches") == []
    assert observed._opentelemetry() is None
    observed._opentelemetry.cache_clear()


def test_a_request_is_a_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    with Running.start(tmp_path) as running, pytest.raises(UsageError):
        running.user("alice").get("/api/searches/9")
    (span,) = spans.get_finished_spans()
    assert span.name == "GET /api/searches/{number}"
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 404
