"""GPUs that cannot run a step: another vendor's, and those that the installed torch no longer supports."""

from __future__ import annotations

import pytest

from small_models import small_job
from snugfit.cli.main import run
from snugfit.errors import GpuError
from snugfit.job.gpu import find_gpu
from snugfit.planning.fleet.search_gpus import plan_gpus
from snugfit.planning.search.search import plan
from snugfit.prediction.device import doubts_about, policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software


@pytest.mark.parametrize(
    ("name", "why"),
    [("mi300x", "is not a CUDA GPU"), ("k80", "does not run on Tesla K80: compute capability 3.7")],
)
def test_a_gpu_that_no_step_runs_on_is_one_sentence_everywhere(
    name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence is the same in `predict`, `plan`, `gpus --for` and `measure`, in Python and
    in the command."""
    small = small_job("gpt2", 1, batch_size=1, sequence_length=8)
    said = []
    for ask in (
        lambda: predict(small, gpu=name),
        lambda: plan(small, gpu=name),
    ):
        with pytest.raises(GpuError) as caught:
            ask()
        said.append(str(caught.value))
    said += [answer.why for answer in plan_gpus(small, [name]).answers]
    assert run(["measure", "gpt2", "--gpu", name]) == 2
    said.append(capsys.readouterr().err.splitlines()[-1].removeprefix("snugfit: "))
    assert len(set(said)) == 1
    assert why in said[0]
    assert "\n" not in said[0]


def test_torch_of_the_time_ran_on_what_today_s_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    policy_for(find_gpu("k80"), Software(name="earlier"))
    assert any("the build for CUDA 12.6" in doubt for doubt in doubts_about(find_gpu("p100-pcie")))
    assert not any("12.6" in doubt for doubt in doubts_about(find_gpu("rtx4090")))
    monkeypatch.setattr("snugfit.prediction.device.version_of", lambda package: "2.7.1+cu118")
    policy_for(find_gpu("k80"), Software())
    assert not any("12.6" in doubt for doubt in doubts_about(find_gpu("v100-16gb")))
