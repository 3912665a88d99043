"""What each dtype of dispatch v3 costs on real text: every pair of every MoE layer goes through the wire's rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.experts import ExpertCompute, local_experts
from kvasir_console.engine.forms import REFERENCE
from kvasir_console.engine.stage import Span, Stage
from kvasir_console.engine.tokens import Tokenizer
from kvasir_console.relay.wire.values import Dtype, decode_rows, encode_rows

pytestmark = pytest.mark.model

TEXT = (
    "The river rises in the hills north of the town and runs for forty kilometres before it meets the sea. In summer "
    "it is shallow enough to wade across, but after the first storms of autumn it carries whole trees. In 1894 a flood "
    "destroyed the mill and two bridges. def area(radius): return 3.14159 * radius ** 2"
)
# Mean KL from the trunk's own distributions (nats), smallest cosine of a position's logits.
BOUNDS = {Dtype.F32: (0.0, 1.0), Dtype.F16: (3e-4, 0.995), Dtype.BF16: (2e-3, 0.995), Dtype.INT8: (0.2, 0.8)}


def over_the_wire(dtype: Dtype, x: torch.Tensor) -> torch.Tensor:
    rows = np.ascontiguousarray(x.numpy())
    return torch.from_numpy(decode_rows(dtype, b"".join(encode_rows(dtype, rows)), 0, *rows.shape).copy())


def remote(dtype: Dtype, experts: ExpertCompute) -> ExpertCompute:
    """All pairs of a layer by one worker: rows rounded on their way there, sums on their way back."""

    def compute(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return over_the_wire(dtype, experts(layer, over_the_wire(dtype, x), ids, weights))

    return compute


def test_every_dtype_stays_within_its_bound_on_real_text(smollm2_moe_path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpoint.open(smollm2_moe_path) as checkpoint:
        tokens = Tokenizer.from_metadata(checkpoint.metadata).encode(TEXT)
        stage = Stage.load(checkpoint, 0, 30, forms=REFERENCE)

    def logits(experts: ExpertCompute | None) -> torch.Tensor:
        with torch.inference_mode():
            rows = stage.embed(torch.tensor(tokens))
            span = Span(stage.new_cache(len(tokens)), 0, len(tokens))
            return stage.logits(stage.forward(rows, [span], experts)).double()

    exact = logits(None)
    wanted = exact.log_softmax(-1)
    for dtype, (most, least) in BOUNDS.items():
        got = logits(remote(dtype, local_experts(stage.banks)))
        kl = float((wanted.exp() * (wanted - got.log_softmax(-1))).sum(-1).mean())
        cosine = float(torch.nn.functional.cosine_similarity(exact, got, dim=-1).min())
        changed = int((exact.argmax(-1) != got.argmax(-1)).sum())
        with capsys.disabled():
            print(f"\n{dtype.name}: KL {kl:.3g}, least cosine {cosine:.7f}, greedy changed {changed} of {len(tokens)}")
        if dtype is Dtype.F32:
            assert torch.equal(got, exact)
        else:
            assert 0 < kl <= most
            assert cosine >= least
