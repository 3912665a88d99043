"""``kvasir-console bench engine`` against a program that speaks the peer's protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import builders

PEER = """
import json, sys
import numpy as np
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "info":
        answer = {"name": "fixed", "system": "none", "load_s": 0.5, "rss_mib": 1.0}
    elif request["op"] == "logits":
        np.save(request["path"], np.zeros(288, dtype=np.float32))
        answer = {}
    else:
        answer = {"tps": 100.0}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.timeout(900)
def test_the_report_has_both_sides_and_their_ratios(tmp_path: Path) -> None:
    model = builders.write_tiny_llama(tmp_path / "tiny.gguf", context_length=2048)
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    command = [sys.executable, "-m", "kvasir_console", "bench", "engine", "--model", str(model), "--pairs", "3"]
    done = subprocess.run(
        [*command, "--threads", "1", "--peer", f"{sys.executable} {peer}", "--json"],
        env={**os.environ, "KVASIR_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for figure in ("decode", "prefill", "batch8"):
        assert report["peer"][f"{figure}_tps"] == 100.0
        assert report[f"{figure}_ratio"] == pytest.approx(report[f"{figure}_tps"] / 100.0)
        low, high = report[f"{figure}_ratio_ci"]
        assert low <= report[f"{figure}_ratio"] <= high
        assert len(report["samples"]["ours"][f"{figure}_tps"]) == 3
    assert report["kl_vs_f32"] < 1e-6  # f32 weights: nothing is rounded on the way
    assert report["peer"]["kl_vs_f32"] > 1e-3  # an even distribution says nothing
    assert min(report["ttft_ms"], report["load_s"], report["rss_mib"]) > 0


def test_a_missing_native_peer_is_told_with_the_way_to_build_it(tmp_path: Path) -> None:
    model = builders.write_tiny_llama(tmp_path / "tiny.gguf", context_length=2048)
    done = subprocess.run(
        [sys.executable, "-m", "kvasir_console", "bench", "engine", "--model", str(model), "--peer", "native"],
        env={**os.environ, "KVASIR_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2
    assert "make native-peer" in done.stderr
