"""A request inside the engine, and what is refused before it gets there."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.replica.engines.base import Rejected
from services.replica.engines.torch.grammar import Grammar
from services.replica.engines.torch.kv import PAGE
from services.replica.engines.torch.lora import Adapter
from services.replica.engines.torch.sampling import Row
from services.replica.engines.torch.scheduler import Sequence
from shared.lifetime import Stamp
from shared.messages import Finished, Generate
from shared.records import ModelCard


@dataclass(eq=False)
class Running:
    """A request, its tokens and memory, and what choosing its next token depends on."""

    request: Generate
    sequence: Sequence
    adapter: Adapter | None
    seed: int
    stops: frozenset[int]
    grammar: Grammar | None = None
    stamps: dict[str, float] = field(default_factory=dict)

    @property
    def made(self) -> int:
        """Tokens of the answer so far, those of earlier attempts included."""
        return len(self.sequence.tokens) - self.sequence.prompt

    def row(self) -> Row:
        """What sampling needs."""
        sequence = self.sequence
        return Row(
            self.request.sampling,
            self.seed,
            self.made,
            sequence.tokens[: sequence.prompt],
            sequence.tokens[sequence.prompt :],
            self.grammar.mask() if self.grammar else None,
        )

    def reason(self, token: int) -> str | None:
        """Why the answer ends with this token, its newest, if it does."""
        if self.grammar is not None:
            self.grammar.accept(token)
        if token in self.stops or (self.grammar is not None and self.grammar.complete):
            return "stop"
        return "length" if self.made >= self.request.sampling.max_tokens else None

    def finished(self, reason: str) -> Finished:
        request, stamps = self.request, self.stamps
        return Finished(
            *(request.id, request.attempt, len(request.prompt), self.made, reason),
            started=stamps.get(Stamp.STARTED, 0.0),
            first_token=stamps.get(Stamp.FIRST_TOKEN, 0.0),
        )


def check(request: Generate, card: ModelCard, kv_tokens: int) -> None:
    """Raises Rejected for what can never be served."""
    if not request.prompt:
        raise Rejected("the prompt is empty", param="prompt")
    tokens = [*request.prompt, *request.generated]
    if not 0 <= min(tokens) <= max(tokens) < card.vocabulary:
        raise Rejected(f"token ids run from 0 to {card.vocabulary - 1}", param="prompt")
    wanted = request.sampling.max_tokens
    if wanted <= len(request.generated):
        raise Rejected(f"max_tokens is {wanted}: nothing is left to do", param="max_tokens")
    total = len(request.prompt) + wanted
    if total > card.context:
        raise Rejected(
            f"{len(request.prompt)} prompt tokens and {wanted} to generate are more than the "
            f"model's context of {card.context}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    if -(-total // PAGE) * PAGE > kv_tokens:
        raise Rejected(
            f"{total} tokens never fit into the KV memory of {kv_tokens}",
            code="context_length_exceeded",
            param="max_tokens",
        )
