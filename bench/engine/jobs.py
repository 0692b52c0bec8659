"""Jobs on an engine in this process, for parts that compare settings of this engine alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.replica.engines.torch import TorchEngine
from shared.messages import Generate, Sampling

_numbers = itertools.count()


@dataclass
class Done:
    """What a job took: seconds, computed prompt tokens, and each request's own figures."""

    seconds: float = 0.0
    prefill_tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token
    answers: list[list[int]] = field(default_factory=list)


def run(
    engine: TorchEngine,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    adapter: str | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> Done:
    """Submit all prompts at once, greedily, and step until every answer has ``tokens`` tokens."""
    number = next(_numbers)
    done = Done(answers=[[] for _ in prompts])
    begin = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.submit(
            Generate(
                id=f"{number}.{i}",
                gateway="",
                model="model",
                adapter=adapter,
                prompt=tuple(prompt),
                sampling=Sampling(max_tokens=tokens, temperature=0.0),
                arrival=0.0,
            )
        )
    while engine.has_work():
        before_step()
        report = engine.step_now()
        done.prefill_tokens += report.prefill_tokens
        for _, output in report.outputs:
            answer = done.answers[int(output.id.split(".")[1])]
            if not answer:
                done.first.append(time.perf_counter() - begin)
            answer += output.tokens
    done.seconds = time.perf_counter() - begin
    return done
