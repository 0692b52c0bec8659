"""A chat through OpenAI's client, with latency limits.

python examples/chat.py "Name three rivers."
"""

import os
import sys
import time

from openai import OpenAI

LIMITS = {"ttft_ms": 1000, "e2e_ms": 20_000}


def main() -> None:
    question = " ".join(sys.argv[1:]) or "Name three rivers."
    url = os.environ.get("COLLM_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("COLLM_API_KEY", "none"))
    model = client.models.list().data[0].id  # base models come first, then adapters

    started = time.monotonic()
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=60,
        extra_body={"slo": LIMITS},  # what the dispatcher plans for; a late answer still comes
    )
    milliseconds = (time.monotonic() - started) * 1000
    print(answer.choices[0].message.content)
    print(
        f"-- {model}: {answer.usage.completion_tokens} tokens in {milliseconds:.0f} ms, "
        f"limit {LIMITS['e2e_ms']} ms"
    )


if __name__ == "__main__":
    main()
