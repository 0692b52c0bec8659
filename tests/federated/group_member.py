"""One member of a process group, as a process: ``python -m tests.federated.group_member``.

Arguments: Redis URL, the group as JSON, and what to do: ``exchange`` or ``die`` (kill itself
after the rendezvous). Prints one JSON line: the sums that arrived, or the error.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import orjson
from redis import Redis

from services.replica.training.exchange import Exchange, GroupBroken
from shared.rounds import Group, from_json


def main(url: str, raw: str, todo: str) -> None:
    group = from_json(orjson.loads(raw), Group)
    redis = Redis.from_url(url, socket_timeout=10)
    tensors = {
        "b": np.full((3, 5), float(group.rank), np.float32),
        "a": np.arange(7 * group.rank + 1, dtype=np.float32),
    }
    try:
        with Exchange(redis, group) as exchange:
            if todo == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if group.rank == 0:
                found, traffic = exchange.receive()
                sums = {m: {n: [float(t.sum()), *t.shape] for n, t in ts.items()}
                        for m, ts in found.items()}  # fmt: skip
                print(orjson.dumps({"sums": sums, "bytes": traffic.bytes}).decode())
            else:
                print(orjson.dumps({"bytes": exchange.send(tensors).bytes}).decode())
    except GroupBroken as e:
        print(orjson.dumps({"broken": str(e)}).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
