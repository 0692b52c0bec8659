"""vLLM's CPU build, tuned: eager, all cores bound, no prefix cache. Run by its own Python."""

from typing import Any

from common import Handler, serve  # type: ignore[import-not-found]  # beside this file


def start(settings: dict[str, Any]) -> Handler:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    slots = settings.get("lora_slots", 0)
    lora = {"enable_lora": True, "max_loras": slots, "max_lora_rank": 8} if slots else {}
    model = LLM(
        settings["model"],
        dtype=settings["dtype"],
        enforce_eager=True,
        max_num_seqs=64,
        max_model_len=2048,
        enable_prefix_caching=False,
        **lora,
    )
    numbers: dict[str, int] = {}

    def handle(job: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True)
        names = job.get("adapters", [])
        for name in names:
            numbers.setdefault(name, len(numbers) + 1)
        step = job["concurrency"]
        for at in range(0, len(job["prompts"]), step):
            part = job["prompts"][at : at + step]
            own = [names[(at + i) % len(names)] for i in range(len(part))] if names else []
            model.generate(
                [{"prompt_token_ids": p} for p in part],
                sampling,
                use_tqdm=False,
                lora_request=[LoRARequest(n, numbers[n], n) for n in own] or None,
            )
        return {}

    return handle


if __name__ == "__main__":
    serve(start)
