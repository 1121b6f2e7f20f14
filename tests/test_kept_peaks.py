"""A library's reset of the allocator's counters hides no peak of a measured run."""

from __future__ import annotations

import pytest
import torch

from snugfit.measurement.child import PEAKS, keep_peaks, with_run_peaks


def test_a_peak_before_the_counters_were_set_back_is_the_run_s(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = dict.fromkeys(PEAKS, 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {**counters, "num_alloc_retries": 1})
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device=None: counters.update(dict.fromkeys(PEAKS, 1))
    )
    keep_peaks()
    counters.update(zip(PEAKS, (70, 80, 90)))
    torch.cuda.reset_peak_memory_stats()
    counters.update(zip(PEAKS, (40, 85, 50)))
    assert with_run_peaks(torch.cuda.memory_stats()) == {
        **dict(zip(PEAKS, (70, 85, 90))),
        "num_alloc_retries": 1,
    }
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_memory_stats()
    assert [with_run_peaks(torch.cuda.memory_stats())[name] for name in PEAKS] == [70, 85, 90]


def test_what_an_earlier_run_reached_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: dict.fromkeys(PEAKS, 5))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    keep_peaks()
    assert with_run_peaks({"requested_bytes.all.peak": 3}) == {"requested_bytes.all.peak": 3}
