"""A file of chats becomes a model, by OpenAI's fine-tuning API.

python examples/finetune.py examples/data/returns.jsonl --suffix support

The job trains while replicas are idle and others go on serving; each round that helps is
published at once and listed as a checkpoint.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from openai import OpenAI

ENDED = ("succeeded", "failed", "cancelled")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="chats, one JSON object a line")
    parser.add_argument("--suffix", default="support", help="part of the new model's name")
    parser.add_argument("--question", default="What is your return policy?")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="metadata")
    options = parser.parse_args()
    url = os.environ.get("COLLM_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("COLLM_API_KEY", "none"))

    with options.data.open("rb") as content:
        file = client.files.create(file=content, purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=client.models.list().data[0].id,
        training_file=file.id,
        suffix=options.suffix,
        metadata=dict(entry.split("=", 1) for entry in options.set),
    )
    told: set[str] = set()
    while job.status not in ENDED:
        time.sleep(0.5)
        for event in reversed(client.fine_tuning.jobs.list_events(job.id, limit=50).data):
            if event.id not in told:
                told.add(event.id)
                print(event.message, flush=True)
        job = client.fine_tuning.jobs.retrieve(job.id)
    print(f"-- {job.status}: {job.fine_tuned_model}")
    if job.fine_tuned_model is None:
        return 1
    answer = client.chat.completions.create(
        model=job.fine_tuned_model,
        messages=[{"role": "user", "content": options.question}],
        max_tokens=40,
    )
    print(answer.choices[0].message.content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
