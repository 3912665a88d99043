"""Two thousand spoiled model files, none of which may harm the process that opens it; the report is printed."""

from __future__ import annotations

import gguf_trials
import pytest

COUNT = 2000


@pytest.mark.timeout(3600)
def test_two_thousand_spoiled_model_files_harm_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report = gguf_trials.run(COUNT, jobs=2)
    with capsys.disabled():
        print(f"\n{report.text()}")
    assert report.count == COUNT
    assert not report.failures, report.text()
