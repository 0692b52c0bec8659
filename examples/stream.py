"""Tokens as they come; Ctrl-C, or --most N, leaves early and frees the replica at once."""

import argparse
import os

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Tell me a story.")
    parser.add_argument("--most", type=int, default=0, help="pieces to read; 0: all")
    options = parser.parse_args()
    url = os.environ.get("COLLM_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("COLLM_API_KEY", "none"))

    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": options.question}],
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    )
    seen = 0
    try:
        for chunk in stream:
            if chunk.usage is not None:  # the last one has no choices
                print(f"\n-- {chunk.usage.completion_tokens} tokens")
            elif piece := chunk.choices[0].delta.content:
                print(piece, end="", flush=True)
                seen += 1
                if seen == options.most:
                    print(f"\n-- left after {seen} pieces")
                    break
    except KeyboardInterrupt:
        print("\n-- left")
    finally:
        stream.close()  # the gateway cancels the request


if __name__ == "__main__":
    main()
