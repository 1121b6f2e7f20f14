"""NVML and CUDA's numbering of GPUs, on made-up machines: memory that is not released, other processes,
garbage, reordered GPUs."""

from __future__ import annotations

import itertools
import os
import re
import threading

import pytest

from fake_nvml import H200_RESERVE, H200_TOTAL, FakeGpu, FakeNvml
from snugfit.errors import GpuError
from snugfit.measurement import contamination
from snugfit.measurement.child_result import ChildResult
from snugfit.measurement.contamination import GpuBaseline
from snugfit.measurement.experiment.run import measured_footprint
from snugfit.measurement.nvml import Card, GpuProcess, NvmlUnavailable, open_nvml
from snugfit.measurement.sampler import Census, Sampler
from snugfit.measurement.target import open_target
from snugfit.measurement.visible_devices import card_at, hides_all, visible_cards
from snugfit.units import MIB

A, B, C = (f"GPU-{digit * 8}-aaaa-bbbb-cccc-000000000000" for digit in "123")
BASELINE = GpuBaseline(used_bytes=3 * MIB, pids=frozenset(), reason=None)


def card_of(library: FakeNvml) -> Card:
    return open_nvml(library).cards()[0]


def three() -> FakeNvml:
    return FakeNvml(FakeGpu(uuid=A), FakeGpu(uuid=B), FakeGpu(uuid=C))


def test_version_two_keeps_the_reserve_apart() -> None:
    memory = card_of(FakeNvml(FakeGpu(used=750 * MIB))).memory()
    assert (memory.total_bytes, memory.used_bytes, memory.reserve_bytes) == (
        H200_TOTAL,
        750 * MIB,
        H200_RESERVE,
    )


def test_old_driver_falls_back_to_version_one_and_says_so() -> None:
    card = card_of(FakeNvml(FakeGpu(used=750 * MIB), version_two=False))
    memory = card.memory()
    assert memory.reserve_bytes is None
    assert memory.used_bytes == 750 * MIB + H200_RESERVE
    assert card.counts_reserve


def test_a_version_that_answered_once_is_kept() -> None:
    """The two versions count differently. Mixing them would attribute 615 MiB to another process after one
    hiccup."""
    library = FakeNvml(FakeGpu())
    card = card_of(library)
    card.memory()
    library.version_two = False
    with pytest.raises(NvmlUnavailable):
        card.memory()


def test_no_library_is_a_reason() -> None:
    with pytest.raises(NvmlUnavailable, match="Shared Library Not Found"):
        open_nvml(FakeNvml(absent=True))


def test_a_binding_without_the_function_is_a_reason() -> None:
    with pytest.raises(NvmlUnavailable, match="nvmlInit"):
        open_nvml(object())


@pytest.mark.parametrize(
    "gpu",
    [
        FakeGpu(used=None),
        FakeGpu(used=-H200_TOTAL),
        FakeGpu(total=0),
        FakeGpu(total="24 GiB"),
        FakeGpu(used=2 * H200_TOTAL),
        FakeGpu(lost=True),
    ],
)
def test_garbage_is_a_reason(gpu: FakeGpu) -> None:
    with pytest.raises(NvmlUnavailable):
        card_of(FakeNvml(gpu)).memory()


def test_a_process_without_bytes_is_still_a_process() -> None:
    library = FakeNvml(FakeGpu(processes=[(7, None), (8, 0), (9, 1 << 63), (10, 5 * MIB)]))
    assert [(found.pid, found.bytes) for found in card_of(library).compute_processes()] == [
        (7, None),
        (8, None),
        (9, None),
        (10, 5 * MIB),
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, [A, B, C]),
        ("0", [A]),
        ("2,0", [C, A]),
        (" 1 , 2", [B, C]),
        ("1gpu,2", [B, C]),
        ("0,7,1", [A]),
        ("0,-1,1", [A]),
        ("0,0", []),
        ("", []),
        ("-1", []),
        ("none", []),
        (B, [B]),
        ("GPU-3", [C]),
        (f"{C},{A}", [C, A]),
        (f"{C},{C}", []),
        (f"{C},1", [C]),
        ("GPU-", []),
        ("GPU-9", []),
    ],
)
def test_visible_devices_as_cuda_reads_them(value: str | None, shown: list[str]) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    with open_nvml(three()) as nvml:
        assert [card.uuid for card in visible_cards(nvml, environment)] == shown


@pytest.mark.parametrize("value", ["-1", "7", "", "GPU-9", "0,0"])
def test_a_gpu_that_is_not_shown_is_an_error_that_names_the_variable(value: str) -> None:
    with open_nvml(three()) as nvml, pytest.raises(GpuError, match=r"CUDA_VISIBLE_DEVICES='.*NVIDIA H200"):
        card_at(nvml, {"CUDA_VISIBLE_DEVICES": value}, 0)


def test_an_index_beyond_what_is_shown_is_an_error() -> None:
    with open_nvml(three()) as nvml, pytest.raises(GpuError, match=r"GPU index 2: .*shows 2"):
        card_at(nvml, {"CUDA_VISIBLE_DEVICES": "2,0"}, 2)


def test_unlike_gpus_are_not_counted_by_an_order_that_nvml_does_not_know() -> None:
    library = FakeNvml(FakeGpu(uuid=A, name="NVIDIA T400"), FakeGpu(uuid=B, name="NVIDIA GeForce RTX 4090"))
    with open_nvml(library) as nvml:
        with pytest.raises(GpuError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            card_at(nvml, {}, 0)
        assert card_at(nvml, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 1).uuid == B
        assert card_at(nvml, {"CUDA_VISIBLE_DEVICES": B}, 0).uuid == B


def test_mig_parts() -> None:
    parts = [FakeGpu(uuid="MIG-aaaa", total=20 << 30), FakeGpu(uuid="MIG-bbbb", total=20 << 30)]
    library = FakeNvml(FakeGpu(uuid=A, parts=parts))
    with open_nvml(library) as nvml:
        assert card_at(nvml, {}, 0).uuid == "MIG-aaaa"
        assert card_at(nvml, {"CUDA_VISIBLE_DEVICES": "MIG-bbbb"}, 0).uuid == "MIG-bbbb"
        with pytest.raises(GpuError):
            card_at(nvml, {"CUDA_VISIBLE_DEVICES": "MIG-cccc"}, 0)


def test_a_gpu_in_mig_mode_without_parts_is_an_error() -> None:
    with open_nvml(FakeNvml(FakeGpu(parts=[]))) as nvml, pytest.raises(GpuError, match="no MIG device"):
        card_at(nvml, {}, 0)


def test_hiding_on_purpose() -> None:
    shown = {
        value: hides_all({"CUDA_VISIBLE_DEVICES": value}) for value in ("", " ", "-1", "0", "7", "GPU-9")
    }
    assert shown == {"": True, " ": True, "-1": True, "0": False, "7": False, "GPU-9": False}
    assert not hides_all({})


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed torch report a CUDA build."""
    monkeypatch.setattr("snugfit.measurement.target.torch_cuda", lambda: "13.0")


@pytest.mark.usefixtures("cuda_build")
class TestPlace:
    def test_the_child_sees_one_gpu_by_uuid(self) -> None:
        environment = {"CUDA_VISIBLE_DEVICES": "2,0"}
        with open_target(None, 1, environment=environment, library=three()) as place:
            assert place.card is not None
            assert place.card.uuid == A
            assert place.visibility == {"CUDA_VISIBLE_DEVICES": A}
            assert place.torch_device == "cuda:0"
            assert place.describe(None, None).reserve_bytes == H200_RESERVE

    def test_nvml_is_given_back(self) -> None:
        library = three()
        with open_target("cuda:2", 0, environment={}, library=library) as place:
            assert place.card is not None
            assert (place.card.uuid, library.open) == (C, 1)
        assert library.open == 0

    @pytest.mark.parametrize("value", ["", "-1"])
    def test_hidden_on_purpose_means_the_cpu(self, value: str) -> None:
        with open_target(None, 0, environment={"CUDA_VISIBLE_DEVICES": value}, library=three()) as place:
            assert place.type == "cpu"
            assert place.visibility == {"CUDA_VISIBLE_DEVICES": ""}

    def test_hidden_by_mistake_is_an_error(self) -> None:
        with (
            pytest.raises(GpuError),
            open_target(None, 0, environment={"CUDA_VISIBLE_DEVICES": "7"}, library=three()),
        ):
            pass

    def test_without_nvml_a_gpu_is_used_only_when_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        absent = FakeNvml(absent=True)
        monkeypatch.setattr("snugfit.measurement.target._has_cuda_driver", lambda: True)
        with open_target(None, 0, environment={}, library=absent) as place:
            assert place.type == "cpu"
        with open_target("cuda", 0, environment={}, library=absent) as place:
            assert (place.type, place.card) == ("cuda", None)
            assert place.doubt is not None
            assert "Not Found" in place.doubt

    def test_a_gpu_without_any_driver_is_refused_before_a_process_starts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
        with (
            pytest.raises(GpuError, match="CUDA's driver is not installed here"),
            open_target("cuda", 0, environment={}, library=FakeNvml(absent=True)),
        ):
            pass

    @pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:-1", "CUDA", ""])
    def test_an_unknown_device_is_an_error(self, device: str) -> None:
        with (
            pytest.raises(GpuError, match="Devices: cpu, cuda"),
            open_target(device, 0, environment={}, library=three()),
        ):
            pass


def test_asking_a_cpu_build_for_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugfit.measurement.target.torch_cuda", lambda: None)
    with (
        pytest.raises(GpuError, match="built without CUDA"),
        open_target("cuda", 0, environment={}, library=three()),
    ):
        pass


def test_clean_before() -> None:
    baseline = contamination.before(card_of(FakeNvml(FakeGpu())), patience=0)
    assert (baseline.used_bytes, baseline.reason) == (3 * MIB, None)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (FakeGpu(processes=[(17, 512 * MIB)]), r"process 17 \(512 MiB\)"),
        (FakeGpu(processes=[(17, None)]), "process 17 used"),
        (FakeGpu(processes=[(os.getpid(), None)]), "this process"),
        (FakeGpu(used=900 * MIB, drawers=[(5, 700 * MIB)]), r"900 MiB were used by a display \(process 5"),
        (FakeGpu(used=900 * MIB), "900 MiB were used by processes that NVML does not list"),
        (FakeGpu(used=900 * MIB, processes=None), "900 MiB"),
        (FakeGpu(lost=True), "it is not known whether other processes used the GPU"),
    ],
)
def test_not_clean_before(gpu: FakeGpu, words: str) -> None:
    reason = contamination.before(card_of(FakeNvml(gpu)), patience=0).reason
    assert reason is not None
    assert re.search(words, reason)


def test_clean_before_is_waited_for() -> None:
    gpu = FakeGpu(script=[9000 * MIB, 400 * MIB, 3 * MIB])
    assert contamination.before(card_of(FakeNvml(gpu)), patience=5).reason is None
    assert gpu.used == 3 * MIB


def test_version_one_cannot_tell_idle_from_reserve() -> None:
    """Under version 1 an idle H200 shows 618 MiB, which must not count as another process."""
    assert contamination.before(card_of(FakeNvml(FakeGpu(), version_two=False)), patience=0).reason is None


def test_clean_after_is_waited_for() -> None:
    gpu = FakeGpu(script=[9000 * MIB, 400 * MIB, 5 * MIB])
    assert contamination.after(card_of(FakeNvml(gpu)), BASELINE, patience=5) is None


def test_memory_that_is_not_given_back_is_told() -> None:
    reason = contamination.after(card_of(FakeNvml(FakeGpu(used=2003 * MIB))), BASELINE, patience=0)
    assert reason is not None
    assert "2,000 MiB were not released" in reason


def test_a_process_that_stays_is_told() -> None:
    card = card_of(FakeNvml(FakeGpu(processes=[(23, None)])))
    assert "process 23" in str(contamination.after(card, BASELINE, patience=0))
    known_before = GpuBaseline(used_bytes=3 * MIB, pids=frozenset({23}), reason="process 23")
    assert contamination.after(card, known_before, patience=0) is None


def census(used: int, ours: dict[int, int | None], others: dict[int, int | None]) -> Census:
    both = [tuple(GpuProcess(pid=pid, bytes=size) for pid, size in each.items()) for each in (ours, others)]
    return Census(used_bytes=used * MIB, own=both[0], foreign=both[1])


@pytest.mark.parametrize(
    ("censuses", "words"),
    [
        ([], None),
        ([census(8003, {7: 8000 * MIB}, {})], None),
        ([census(8003, {7: None}, {})], None),
        ([census(8003, {}, {4242: None})], None),  # ours, by the host's number
        ([census(8003, {7: None}, {}), census(9000, {7: None}, {8: 900 * MIB})], "process 8"),
        ([census(8003, {}, {4242: None, 4243: None})], "2 processes"),
        ([census(10003, {7: 8000 * MIB}, {})], "2,000 MiB"),  # a process that NVML does not list
    ],
)
def test_strangers_during_the_run(censuses: list[Census], words: str | None) -> None:
    reason = contamination.sentence_on_processes(censuses, BASELINE)
    assert (words in reason) if words and reason else reason is words


def test_those_who_were_there_before_are_told_once() -> None:
    baseline = GpuBaseline(used_bytes=500 * MIB, pids=frozenset({8}), reason="process 8")
    assert contamination.sentence_on_processes([census(9000, {7: None}, {8: None})], baseline) is None


def test_unexplained_growth() -> None:
    """Measured on an H200: a context of 621 MiB at first, and 751 to 767 MiB at the end."""
    reserved = 6894 * MIB
    usual = contamination.unexplained_growth(
        reserved + 767 * MIB, reserved_bytes=reserved, context_bytes=621 * MIB
    )
    stranger = contamination.unexplained_growth(
        reserved + 2767 * MIB, reserved_bytes=reserved, context_bytes=621 * MIB
    )
    assert usual is None
    assert stranger is not None
    assert "2,146 MiB" in stranger


def test_the_sampler_keeps_the_peak() -> None:
    gpu = FakeGpu(script=[3 * MIB, 3 * MIB, 900 * MIB, 8000 * MIB, 500 * MIB])
    library, read = FakeNvml(gpu), threading.Event()
    library.before_reading = lambda: read.set() if not gpu.script else None
    with Sampler(card_of(library), interval=0.001) as sampler:
        assert read.wait(30)
    assert sampler.peak_bytes == 8000 * MIB
    assert sampler.refusal is None


def test_the_sampler_sees_who_comes_during_the_run() -> None:
    gpu = FakeGpu(processes=[(7, None)])
    library, readings, late = FakeNvml(gpu), itertools.count(), threading.Event()

    def come() -> None:
        if next(readings) > 5 and gpu.processes is not None and len(gpu.processes) == 1:
            gpu.processes.append((666, 4000 * MIB))
        if len(sampler.censuses) > 1:
            late.set()

    with Sampler(card_of(library), belongs=lambda pid: pid == 7, interval=0.0005) as sampler:
        library.before_reading = come
        assert late.wait(30)
    assert "process 666" in str(contamination.sentence_on_processes(sampler.censuses.values(), BASELINE))


def test_the_sampler_survives_a_lost_gpu() -> None:
    gpu = FakeGpu()
    with Sampler(card_of(FakeNvml(gpu)), interval=0.0005) as sampler:
        gpu.lost = True
    assert sampler.peak_bytes == 3 * MIB
    assert sampler.refusal is not None


def test_managed_memory_of_a_run_is_its_own_and_no_context() -> None:
    """For a run with 1,428 MiB of paged states on an H100, NVML counted twelve steps of 128 MiB."""
    result = ChildResult(
        outcome="ok",
        host_bytes=1 << 30,
        reserved_bytes=2400 << 20,
        first_context_bytes=500 << 20,
        paged_bytes=1428 << 20,
    )
    shape = measured_footprint(result, (2400 + 768 + 12 * 128) << 20)
    assert shape is not None
    assert (shape.managed_bytes, shape.context_bytes) == (12 * 128 << 20, 768 << 20)
    on_the_host = measured_footprint(result, (2400 + 768) << 20)
    assert on_the_host is not None
    assert on_the_host.managed_bytes + (on_the_host.context_bytes or 0) == 768 << 20
