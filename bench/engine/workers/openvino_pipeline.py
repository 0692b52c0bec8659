"""OpenVINO GenAI with continuous batching. Run by its own Python; the model is converted once."""

from pathlib import Path
from typing import Any

from common import Handler, serve  # type: ignore[import-not-found]  # beside this file


def start(settings: dict[str, Any]) -> Handler:
    import numpy as np
    import openvino as ov  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    folder = Path(settings["converted"])
    if not (folder / "openvino_model.xml").exists():
        from optimum.intel import OVModelForCausalLM  # type: ignore[import-not-found]

        OVModelForCausalLM.from_pretrained(
            settings["model"], export=True, compile=False, load_in_8bit=False
        ).save_pretrained(folder)
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = 64
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    hint = "bf16" if settings["dtype"] == "bfloat16" else "f32"
    pipeline = genai.ContinuousBatchingPipeline(
        str(folder), scheduler, "CPU", {"INFERENCE_PRECISION_HINT": hint}
    )

    def handle(job: dict[str, Any]) -> dict[str, Any]:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = job["tokens"]
        config.ignore_eos = True
        step = job["concurrency"]
        for at in range(0, len(job["prompts"]), step):
            part = job["prompts"][at : at + step]
            ids = [ov.Tensor(np.array([p], dtype=np.int64)) for p in part]
            pipeline.generate(ids, [config] * len(part))
        return {}

    return handle


if __name__ == "__main__":
    serve(start)
