"""llama.cpp through llama-cpp-python's low-level batches. Run by its own Python; needs a GGUF."""

from typing import Any

from common import Handler, serve  # type: ignore[import-not-found]  # beside this file

SLOTS, ROWS = 64, 512  # sequences, tokens a batch
Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class Worker:
    """Sequences decoded together, greedily."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp  # type: ignore[import-not-found]

        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            settings["gguf"].encode(), llama_cpp.llama_model_default_params()
        )
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_seq_max = SLOTS * 512, ROWS, SLOTS
        parameters.n_threads = parameters.n_threads_batch = settings["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.batch = llama_cpp.llama_batch_init(ROWS, 0, 1)

    def compute(self, rows: list[Row]) -> list[int]:
        """The best next token after each wanted row."""
        import numpy as np

        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = wanted
        if self.api.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")
        best = []
        for i in (i for i, row in enumerate(rows) if row[3]):
            logits = self.api.llama_get_logits_ith(self.context, i)
            best.append(int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax()))
        return best

    def together(self, prompts: list[list[int]], count: int) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        current = []
        for s, prompt in enumerate(prompts):
            rows = [(t, i, s, i + 1 == len(prompt)) for i, t in enumerate(prompt)]
            found: list[int] = []
            for at in range(0, len(rows), ROWS):
                found = self.compute(rows[at : at + ROWS])
            current += found
        for n in range(count - 1):
            current = self.compute(
                [(t, len(prompts[s]) + n, s, True) for s, t in enumerate(current)]
            )

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        step = min(job["concurrency"], SLOTS)
        for at in range(0, len(job["prompts"]), step):
            self.together(job["prompts"][at : at + step], job["tokens"])
        return {}


def start(settings: dict[str, Any]) -> Handler:
    return Worker(settings)


if __name__ == "__main__":
    serve(start)
