"""Chaos: the real system under real load while its parts are killed, stopped and fed rubbish.

``python -m tests.chaos --minutes 10`` (``make chaos MINUTES=10``). Judged from the client's side
and from Redis: every accepted request ends exactly once, nothing is spliced, greedy answers equal
those of an undisturbed engine for the adapter version that the response names.
"""
