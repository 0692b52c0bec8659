"""The generation routes: POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from services.gateway import errors, logprobs, params, prompts, structured, tools, wire
from services.gateway.access import Principal
from services.gateway.answer import Answer, Choice
from services.gateway.catalogue import Target
from services.gateway.errors import ApiError, Headers, bad_value
from services.gateway.feedback import Asked
from services.gateway.forms import KEEP_ALIVE, ChatForm, CompletionForm, Form
from services.gateway.http import Exchange
from shared.messages import Generate, Sampling
from shared.replica_state import State

if TYPE_CHECKING:
    from services.gateway.service import Gateway

SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect a stream
]
COMPLETION_TOKENS = 16  # OpenAI's default length of /v1/completions


class Generation:
    """Both routes; everything from the body to the last byte of the answer."""

    def __init__(self, gateway: Gateway) -> None:
        self._settings, self._gateway = gateway.settings, gateway.id
        self._catalogue, self._desk = gateway.catalogue, gateway.desk
        self._metrics, self._tenant_limits = gateway.metrics, gateway.limits
        self._clock, self._memory = gateway.clock, gateway.memory

    async def chat(self, exchange: Exchange) -> None:
        body = await exchange.body(self._settings.max_body_bytes, self._settings.body_timeout)
        received = self._clock()
        request = wire.chat_request(body)
        answer, offered = await self.prepare(exchange, request, len(body), received)
        parallel = request.parallel_tool_calls is not False
        form = ChatForm(
            answer.id,
            int(received),
            request.model,
            answer.choices[0].model.card.emulated,
            answer.stream,
            _with_usage(request),
            [tools.Calls(parallel) for _ in answer.choices] if offered else (),
        )
        await self.serve(exchange, answer, form, _with_usage(request))
        self.remember(exchange, request, answer)

    async def prepare(
        self, exchange: Exchange, request: wire.ChatRequest, size: int, received: float
    ) -> tuple[Answer, bool]:
        """A chat as far as the queue, and whether it may call tools. ``size``: bytes of the body.

        Raises ApiError 400, 404, 503.
        """
        params.check(request)
        probabilities = logprobs.wanted_chat(request)
        grammar = structured.grammar(request.response_format)
        target = await self.target(request.model, exchange.caller)
        offered = tools.offered(request, target.model)
        grammar = tools.demanded(request, grammar) or grammar
        prompt = await prompts.chat_prompt(request, target.model, size, offered)
        named, param = request.max_completion_tokens, "max_completion_tokens"
        if named is None:
            named, param = request.max_tokens, "max_tokens"
        length = params.max_tokens(
            named,
            param,
            len(prompt),
            target.model.card.context,
            target.model.settings.default_max_tokens,
        )
        sampling = _sampling(request, target, length, probabilities, grammar)
        answer = self._build(exchange, request, target, [(prompt, sampling)], received)
        return answer, bool(offered)

    async def completion(self, exchange: Exchange) -> None:
        body = await exchange.body(self._settings.max_body_bytes, self._settings.body_timeout)
        received = self._clock()
        request = wire.completion_request(body)
        params.check(request)
        probabilities = logprobs.wanted_completion(request)
        grammar = structured.grammar(request.response_format)
        target = await self.target(request.model, exchange.caller)
        special = request.add_special_tokens is not False
        ids = await prompts.completion_prompts(request.prompt, target.model, special, len(body))
        context = target.model.card.context
        members = []
        for prompt in ids:
            length = params.max_tokens(
                request.max_tokens, "prompt", len(prompt), context, COMPLETION_TOKENS
            )
            sampling = _sampling(request, target, length, probabilities, grammar)
            members.append((prompt, sampling))
        answer = self._build(exchange, request, target, members, received)
        form = CompletionForm(
            answer.id,
            int(received),
            request.model,
            target.model.card.emulated,
            _with_usage(request),
            bool(request.echo),
        )
        await self.serve(exchange, answer, form, _with_usage(request))

    def remember(self, exchange: Exchange, request: wire.ChatRequest, answer: Answer) -> None:
        """For feedback, where the tenant wants it."""
        own = self._settings.tenants.get(exchange.caller.tenant)
        if own is None or not own.feedback_adapter or not answer.done:
            return
        asked = Asked(
            base=answer.choices[0].model.card.name,
            adapter=own.feedback_adapter,
            messages=prompts.check_messages(request.messages),
            answer=answer.choices[0].text(),
        )
        ids = {exchange.tag.decode(), exchange.id}
        self._memory.keep(exchange.caller.tenant, ids, asked)

    # ------------------------------------------------------------ before the queue

    async def target(self, name: str, caller: Principal, *, needs_replica: bool = True) -> Target:
        """The model or adapter of that name. Raises ApiError 404, 503."""
        target = await self._catalogue.look_up(name, caller.sees)
        now = self._catalogue.now
        if target is None:
            if name in now.unusable:
                raise errors.unavailable(f"model {name!r}: {now.unusable[name]}", 30.0)
            if State.STARTING in now.replicas.get(name, {}).values():
                self._metrics.rejected("no_replica")
                loading = f"model {name!r} is being loaded"
                raise errors.unavailable(loading, self._settings.retry_after)
            if name in self._settings.models:
                raise self._no_replica(name)
            self._metrics.rejected("model_not_found")
            raise errors.model_not_found(name)
        base = target.model.name
        refuse = needs_replica and self._settings.when_no_replica == "refuse"
        if refuse and not now.alive(base):
            await self._catalogue.look_up("")  # one may have started this moment
            if not self._catalogue.now.alive(base):
                raise self._no_replica(base)
        return target

    def _no_replica(self, name: str) -> ApiError:
        self._metrics.rejected("no_replica")
        return errors.unavailable(
            f"no replica of model {name!r} is alive", self._settings.retry_after
        )

    def _build(
        self,
        exchange: Exchange,
        request: wire.Parameters,
        target: Target,
        members: Sequence[tuple[tuple[int, ...], Sampling]],
        received: float,
    ) -> Answer:
        """The choices: n for each prompt, each a request of its own."""
        n = request.n or 1
        if n * len(members) > self._settings.max_choices:
            raise bad_value("n", f"at most {self._settings.max_choices} choices a request")
        slo = params.objective(request.slo, exchange.headers, target.model.settings.slo.slo())
        stops = params.stops(request)
        stream = bool(request.stream)
        traceparent = "" if exchange.trace is None else exchange.trace.parent
        choices: list[Choice] = []
        for prompt, sampling in members:
            for k in range(n):
                if k and sampling.seed is not None:  # equal choices are of no use
                    sampling = msgspec.structs.replace(sampling, seed=sampling.seed + 1)
                generate = Generate(
                    id=f"{exchange.id}.{len(choices)}",
                    gateway=self._gateway,
                    model=target.model.name,
                    adapter=None if target.adapter is None else target.adapter.name,
                    tenant=exchange.caller.tenant,
                    prompt=prompt,
                    sampling=sampling,
                    slo=slo,
                    arrival=received,
                    deadline=slo.deadline(received),
                    priority=-request.priority,
                    traceparent=traceparent,
                )
                choices.append(
                    Choice(
                        generate,
                        target.model,
                        len(choices),
                        stops=stops,
                        include_stop=request.include_stop_str_in_output,
                        incremental=stream,
                    )
                )
        tokens = sum(len(prompt) for prompt, _ in members)
        return Answer(exchange.id, choices, tokens, received, stream)

    # ------------------------------------------------------------ the answer

    async def serve(self, exchange: Exchange, answer: Answer, form: Form, with_usage: bool) -> None:
        """Admit, queue, answer, give back. Raises ApiError, ClientGone."""
        entry = None
        if not self._tenant_limits.none:
            most = answer.prompt_tokens + sum(c.request.sampling.max_tokens for c in answer.choices)
            entry, limits = await self._tenant_limits.admit(exchange.caller.tenant, most)
            exchange.extra += limits
        if exchange.trace is not None:
            exchange.trace.answer = answer
        self._desk.open(answer, exchange)
        try:
            if answer.stream:
                await self._stream(exchange, answer, form, with_usage)
            else:
                await answer.complete()
                await exchange.respond(200, form.whole(answer), _about(answer))
        finally:
            self._desk.close(answer)
            if entry is not None:
                entry.close(answer.prompt_tokens + sum(len(c.tokens) for c in answer.choices))

    async def _stream(
        self, exchange: Exchange, answer: Answer, form: Form, with_usage: bool
    ) -> None:
        silence = self._settings.sse_keep_alive or None
        begun = await answer.begun(silence)  # an error until here is a plain HTTP error
        await exchange.start(200, [*SSE, *_about(answer)])
        parts = [form.first(choice) for choice in answer.choices]
        if not begun:
            parts.append(KEEP_ALIVE)
        closed: set[int] = set()
        try:
            while True:
                parts += _news(answer, form, closed)
                if answer.done:
                    break
                if parts:
                    await exchange.write(b"".join(parts))
                    parts = []
                answer.check()
                if not (answer.done or any(c.has_fresh for c in answer.choices)):
                    if not await answer.changed(silence):
                        parts.append(KEEP_ALIVE)
                    answer.check()
        except ApiError as e:
            await exchange.write(b"".join([*parts, form.error(e)]), more=False)
            return
        if with_usage:
            parts.append(form.usage(answer))
        parts.append(form.end)
        await exchange.write(b"".join(parts), more=False)


def _news(answer: Answer, form: Form, closed: set[int]) -> list[bytes]:
    """Chunks with what is new; choices that have ended go into ``closed``."""
    parts = []
    for choice in answer.choices:
        if choice.has_fresh:
            parts.append(form.piece(choice))
        if choice.finish is not None and choice.index not in closed:
            closed.add(choice.index)
            parts.append(form.last(choice))
    return parts


def _with_usage(request: wire.Parameters) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage


def _sampling(
    request: wire.Parameters,
    target: Target,
    length: int,
    probabilities: int | None,
    grammar: str | None,
) -> Sampling:
    model = target.model
    return params.sampling(
        request,
        length,
        model.tokenizer.eos_ids,
        model.card.vocabulary,
        logprobs=probabilities,
        grammar=grammar,
    )


def _about(answer: Answer) -> Headers:
    """The adapter version that answers."""
    version = answer.choices[0].version
    return [] if version is None else [(b"x-collm-adapter-version", version.encode())]
