"""llama.cpp as a peer: a child program that answers one JSON request a line on its standard input.

    python peer_llamacpp.py xllamacpp|native MODEL.gguf THREADS CONTEXT

It runs in the interpreter that has the peer's package and imports nothing of this project. Requests and answers:

    {"op": "info"}                                   {"name", "system", "load_s", "rss_mib"}
    {"op": "prefill", "tokens": [...]}               {"tps"}            rows a second, one token sampled
    {"op": "decode", "tokens": [...], "n": n}        {"tps"}            tokens a second after the first
    {"op": "batch", "prompts": [[...], ...], "n": n} {"tps"}            tokens of all streams a second, prompts included
    {"op": "logits", "tokens": [...], "path": P}     {}                 log-probabilities (V,) f32 as a .npy file
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    kind, model, threads, context = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")  # the peer's own talk must not come between the answers
    os.dup2(2, 1)
    started = time.perf_counter()
    peer: Any = {"xllamacpp": ServerPeer, "native": LibraryPeer}[kind](model, threads, context)
    load_s = time.perf_counter() - started
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "info":
            answer = {"name": kind, "system": peer.system(), "load_s": load_s, "rss_mib": rss_mib()}
        else:
            answer = getattr(peer, request.pop("op"))(**request) or {}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class ServerPeer:
    """The xllamacpp wheel: llama.cpp's own server, asked over loopback HTTP; its own timings are believed."""

    def __init__(self, model: str, threads: int, context: int) -> None:
        import xllamacpp as x

        params = x.CommonParams()
        params.model.path = model
        params.n_ctx = context * 8
        params.n_parallel = 8
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.warmup = True
        self._system = x.get_system_info()
        self._server = x.Server(params)
        self._token = 32

    def system(self) -> str:
        return str(self._system)

    def _complete(self, tokens: list[int], n: int, **more: Any) -> dict[str, Any]:
        body = {
            "prompt": tokens,
            "n_predict": n,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            **more,
        }
        answer = self._server.handle_completions(body)
        return json.loads(answer) if isinstance(answer, str) else dict(answer)

    def prefill(self, tokens: list[int]) -> dict[str, float]:
        return {"tps": self._timings(self._complete(tokens, 1))["prompt_per_second"]}

    def decode(self, tokens: list[int], n: int) -> dict[str, float]:
        return {"tps": self._timings(self._complete(tokens, n))["predicted_per_second"]}

    def batch(self, prompts: list[list[int]], n: int) -> dict[str, float]:
        from concurrent.futures import ThreadPoolExecutor

        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda tokens: self._complete(tokens, n), prompts))
        return {"tps": len(prompts) * n / (time.perf_counter() - started)}

    def logits(self, tokens: list[int], path: str) -> None:
        import numpy as np

        answer = self._complete(tokens, 1, logprobs=1_000_000, logit_bias=[[self._spoken(), 1000]])
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]  # those before the bias
        logprobs = np.full(1 + max(each["id"] for each in top), -np.inf, dtype=np.float32)
        for each in top:
            logprobs[each["id"]] = each["logprob"]
        np.save(path, logprobs)

    def _spoken(self) -> int:
        """A token that is whole characters: the server tells no probabilities with one that ends inside of one."""
        while True:
            answer = self._complete([self._token], 1, logprobs=1, logit_bias=[[self._token, 1000]])
            if answer["choices"][0]["logprobs"]:
                return self._token
            self._token += 1

    @staticmethod
    def _timings(answer: dict[str, Any]) -> dict[str, float]:
        timings: dict[str, float] = answer["timings"]
        return timings


class LibraryPeer:
    """A native build of llama.cpp through llama-cpp-python's plain C bindings: no server, no Python in the loop but a
    call a step."""

    def __init__(self, model: str, threads: int, context: int) -> None:
        import llama_cpp as c

        self._c = c
        c.llama_backend_init()
        parameters = c.llama_model_default_params()
        self._model = c.llama_model_load_from_file(model.encode(), parameters)
        settings = c.llama_context_default_params()
        settings.n_ctx = context * 8
        settings.n_batch = settings.n_ubatch = 512
        settings.n_seq_max = 8
        settings.n_threads = settings.n_threads_batch = threads
        self._context = c.llama_init_from_model(self._model, settings)
        self._n_vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(512, 0, 8)
        self._decode([(0, 0, 1, True)])  # warm
        self._clear()

    def system(self) -> str:
        return str(self._c.llama_print_system_info().decode())

    def _clear(self) -> None:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (sequence, position, token, wants logits)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, token, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if self._c.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")

    def _row(self, i: int) -> Any:
        import numpy as np

        pointer = self._c.llama_get_logits_ith(self._context, i)
        return np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))

    def _feed(self, sequence: int, tokens: list[int]) -> None:
        for begin in range(0, len(tokens), 512):
            part = tokens[begin : begin + 512]
            self._decode([(sequence, begin + i, token, begin + i == len(tokens) - 1) for i, token in enumerate(part)])

    def prefill(self, tokens: list[int]) -> dict[str, float]:
        self._clear()
        started = time.perf_counter()
        self._feed(0, tokens)
        int(self._row(-1).argmax())
        return {"tps": len(tokens) / (time.perf_counter() - started)}

    def decode(self, tokens: list[int], n: int) -> dict[str, float]:
        self._clear()
        self._feed(0, tokens)
        token = int(self._row(-1).argmax())
        started = time.perf_counter()
        for i in range(n - 1):
            self._decode([(0, len(tokens) + i, token, True)])
            token = int(self._row(-1).argmax())
        return {"tps": (n - 1) / (time.perf_counter() - started)}

    def batch(self, prompts: list[list[int]], n: int) -> dict[str, float]:
        self._clear()
        started = time.perf_counter()
        last = []
        for sequence, tokens in enumerate(prompts):
            self._feed(sequence, tokens)
            last.append(int(self._row(-1).argmax()))
        for i in range(n - 1):
            self._decode([(s, len(prompts[s]) + i, token, True) for s, token in enumerate(last)])
            last = [int(self._row(s).argmax()) for s in range(len(prompts))]
        return {"tps": len(prompts) * n / (time.perf_counter() - started)}

    def logits(self, tokens: list[int], path: str) -> None:
        import numpy as np

        self._clear()
        self._feed(0, tokens)
        np.save(path, np.array(self._row(-1), dtype=np.float32))


if __name__ == "__main__":
    main()
