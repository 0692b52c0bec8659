"""OpenTelemetry spans of a request across gateway, dispatcher and replica.

All of them are made here, once the request has ended, from the stamps that its last reply
carries anyway (``shared.lifetime.Stamp``). Dispatcher and replica so need no exporter, no
package and not a microsecond, a span costs nothing while tokens flow, and the times are on one
clock (Redis's) instead of one a host. The price: what never answered (a replica that died)
shows as an event, not as a span of its own.

    POST /v1/chat/completions        gateway     headers read to last byte written
      generate                       gateway     one a choice: received to its last token here
        queue                        dispatcher  received to released; event: read
        release                      replica     in the replica's stream, until it has memory
        prefill                      replica     to the first token
        decode                       replica     first to last token
        finish                       gateway     last token computed to last token here

Attributes follow OpenTelemetry's conventions for HTTP and generative AI; ours begin with
``collm.``. No prompt and no answer is among them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.gateway.answer import Answer, Choice
from services.gateway.errors import ApiError, ClientGone
from services.gateway.http import Exchange
from services.gateway.tracing import Handler
from shared.lifetime import Stamp

HEADERS = ("traceparent", "tracestate")
SERVICES = ("gateway", "dispatcher", "replica")
# Name, service, from, to: the spans of a choice that the stamps bound.
PHASES = (
    ("queue", "dispatcher", Stamp.RECEIVED, Stamp.RELEASED),
    ("release", "replica", Stamp.RELEASED, Stamp.STARTED),
    ("prefill", "replica", Stamp.STARTED, Stamp.FIRST_TOKEN),
    ("decode", "replica", Stamp.FIRST_TOKEN, Stamp.FINISHED),
)
_PROPAGATOR = TraceContextTextMapPropagator()


def exporting() -> SpanProcessor:
    """Sends in batches by OTLP over HTTP, from a thread of its own; told by ``OTEL_*``."""
    return BatchSpanProcessor(OTLPSpanExporter())


class Trace:
    """One HTTP request under way. ``answer`` is set once it has been accepted."""

    __slots__ = ("answer", "context", "root")

    def __init__(self, root: Span) -> None:
        self.root = root
        self.context = trace.set_span_in_context(root)
        self.answer: Answer | None = None

    @property
    def parent(self) -> str:
        """The request's own span as a W3C ``traceparent``."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self.context)
        return carrier.get("traceparent", "")


class Spans:
    """Makes the spans and hands them to ``processor``. ``clock``: Redis seconds."""

    def __init__(self, processor: SpanProcessor, gateway: str, clock: Callable[[], float]) -> None:
        self._processor, self._clock = processor, clock
        found = Resource.create()  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
        named = str(found.attributes["service.name"])
        prefix = "collm" if named.startswith("unknown_service") else named
        self._tracers: dict[str, trace.Tracer] = {}
        for service in SERVICES:
            own = {"service.name": f"{prefix}-{service}"}
            if service == "gateway":
                own["service.instance.id"] = gateway
            provider = TracerProvider(resource=found.merge(Resource(own)), shutdown_on_exit=False)
            provider.add_span_processor(processor)
            self._tracers[service] = provider.get_tracer("collm", version("collm"))

    def shutdown(self) -> None:
        """Send what has not been sent; blocks for the exporter's time limit at most."""
        self._processor.shutdown()

    def traced(self, handler: Handler) -> Handler:
        """``handler`` with a trace around it; the client's ``traceparent`` is its parent."""

        async def traced(exchange: Exchange) -> None:
            root = self._begin(exchange)
            ours = exchange.trace = Trace(root)
            status: int | None = 500  # unless the handler ends in one of the ways below
            try:
                await handler(exchange)
                status = 200
            except ApiError as e:
                status = e.status
                _failed(root, e)
                raise
            except ClientGone:
                status = None
                root.set_attribute("error.type", "client_gone")
                raise
            finally:
                if status is not None:
                    root.set_attribute("http.response.status_code", status)
                if root.is_recording() and ours.answer is not None:
                    self._answer(ours, ours.answer)
                root.end(_nanoseconds(self._clock()))

        return traced

    def _begin(self, exchange: Exchange) -> Span:
        given = {
            name: exchange.headers[name.encode()].decode("latin-1")
            for name in HEADERS
            if name.encode() in exchange.headers
        }
        return self._tracers["gateway"].start_span(
            f"POST {exchange.path}",
            _PROPAGATOR.extract(given, Context()),
            SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "url.path": exchange.path,
                "collm.request_id": exchange.id,
                "collm.tenant": exchange.caller.tenant,
            },
            start_time=_nanoseconds(self._clock()),
        )

    def _answer(self, ours: Trace, answer: Answer) -> None:
        if answer.error is not None:  # also when the stream had begun with 200
            _failed(ours.root, answer.error)
        for choice in answer.choices:
            self._choice(ours.context, answer, choice)

    def _choice(self, context: Context, answer: Answer, choice: Choice) -> None:
        end = self._clock() if choice.finished_at is None else choice.finished_at
        span = self._tracers["gateway"].start_span(
            "generate",
            context,
            attributes=_attributes(choice),
            start_time=_nanoseconds(answer.received),
        )
        if choice.first_at is not None:
            span.add_event("first_token", timestamp=_nanoseconds(choice.first_at))
        for at, replica in choice.lost:
            span.add_event("lost", {"collm.replica": replica}, _nanoseconds(at))
        if choice.finish is None:
            span.set_status(Status(StatusCode.ERROR, "ended without an answer"))
        within = trace.set_span_in_context(span)
        for name, service, start, stop in PHASES:
            if start in choice.stamps and stop in choice.stamps:
                part = self._part(within, service, name, choice.stamps[start], choice.stamps[stop])
                if service == "replica":
                    part.set_attribute("collm.replica", choice.replica)
                if name == "queue" and Stamp.QUEUED in choice.stamps:
                    part.add_event("read", timestamp=_nanoseconds(choice.stamps[Stamp.QUEUED]))
                part.end(_end(choice.stamps[start], choice.stamps[stop]))
        last = choice.stamps.get(Stamp.FINISHED)
        if last is not None:
            self._part(within, "gateway", "finish", last, end).end(_end(last, end))
        span.end(_end(answer.received, end))

    def _part(self, context: Context, service: str, name: str, start: float, stop: float) -> Span:
        return self._tracers[service].start_span(name, context, start_time=_nanoseconds(start))


def _attributes(choice: Choice) -> dict[str, str | int | float | bool | tuple[str, ...]]:
    request = choice.request
    found: dict[str, str | int | float | bool | tuple[str, ...]] = {
        "gen_ai.request.model": request.adapter or request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.request.max_tokens": request.sampling.max_tokens,
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.output_tokens": len(choice.tokens),
        "collm.choice": choice.index,
        "collm.attempt": choice.attempt,
        "collm.replica": choice.replica,
        "collm.emulated": choice.model.card.emulated,
    }
    if choice.finish is not None:
        found["gen_ai.response.finish_reasons"] = (choice.finish,)
    if choice.version is not None:
        found["collm.adapter_version"] = choice.version
    return found


def _failed(span: Span, error: ApiError) -> None:
    span.set_attribute("error.type", error.code or error.type)
    if error.status >= 500:
        span.set_status(Status(StatusCode.ERROR, error.message))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _end(start: float, stop: float) -> int:
    """Clocks of two hosts may differ by less than a phase takes: never before its start."""
    return _nanoseconds(max(start, stop))
