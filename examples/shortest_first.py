r"""A dispatch policy of your own: of the waiting requests, the shortest goes first.

A policy is pure: it is told what happened and when, and says what should happen. So one class
runs in the dispatcher and in the simulator:

    collm up --policy examples.shortest_first:ShortestFirst
    collm simulate --policy examples.shortest_first:ShortestFirst --rate 20 --rate-scale 1 \
        --limit 2000

`services/dispatcher/policies/base.py` holds the whole interface. This one starts from the frame
of the simple policies, which knows about credit, adapters and replicas that die.
"""

from services.dispatcher.policies.base import Action, Request
from services.dispatcher.policies.fcfs import FirstCome
from services.dispatcher.policies.fleet import Member


class ShortestFirst(FirstCome):
    """Shortest job first by the most that a request may cost: its prompt and its longest answer.

    Mean latency falls; a long request can wait for ever while short ones keep coming, unless
    ``patience`` (seconds) has passed, after which it counts as short.
    """

    name = "shortest_first"

    def __init__(self, patience: float = 10.0) -> None:
        super().__init__()
        self.patience = patience

    def decide(self, now: float) -> list[Action]:
        def cost(request: Request) -> int:
            if now - request.arrival > self.patience:
                return 0
            return request.prompt_tokens + request.max_tokens

        waiting = sorted(self._queue.values(), key=cost)
        self._queue = {request.id: request for request in waiting}
        return super().decide(now)

    def choose(self, request: Request, candidates: list[Member]) -> Member:
        return min(candidates, key=lambda member: member.load)
