"""transformers' generate in static batches of at most 16, prompts sorted by length."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.engine.workers.common import Handler, serve

BATCH = 16


def start(settings: dict[str, Any]) -> Handler:
    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()

    def handle(job: dict[str, Any]) -> dict[str, Any]:
        ordered = sorted(job["prompts"], key=len)
        size = min(BATCH, job["concurrency"])
        for at in range(0, len(ordered), size):
            part = ordered[at : at + size]
            longest = max(map(len, part))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in part])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part])
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=job["tokens"],
                min_new_tokens=job["tokens"],
                do_sample=False,
                pad_token_id=0,
            )
        return {}

    return handle


if __name__ == "__main__":
    serve(start)
