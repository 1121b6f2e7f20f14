"""Technique of worker processes that prepare batches in page-locked memory, so that copies run in parallel to
the computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.job.inputs import inputs_of
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import between
from snugfit.techniques.setup import LoaderWish
from snugfit.techniques.technique import Fidelity, Technique

if TYPE_CHECKING:
    from snugfit.job.job import Job

TOKEN_WORKERS = 2
"""Number of worker processes that a plan chooses for batches of tokens. Two suffice for any step."""

MOST = 8
"""Largest number of worker processes in a plan (chosen): hosts have that many cores for each GPU."""

BYTES_OF_ONE = 3 * 2**20
"""Bytes of fp32 pictures or sound that a plan assigns to each worker. A worker prepares them in some 4 ms at
the packaged rates of a host, so that few steps wait for them.
"""


@dataclass(frozen=True, kw_only=True)
class Workers(Technique):
    """Prepares batches in n processes, in page-locked memory that the device copies from directly."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "torch.utils.data.DataLoader(num_workers=n, pin_memory=True)"
    elsewhere: ClassVar = ("dataloader_num_workers", "num_workers", "pin_memory", "dataloader_pin_memory")
    counterparts: ClassVar = (
        Counterpart(arguments={"dataloader_num_workers": Setting("n"), "dataloader_pin_memory": True}),
        Counterpart(
            arguments={"dataloader_num_workers": Setting("n"), "dataloader_pin_memory": False},
            note="workers always pin their batches, which changes no byte on the GPU",
        ),
    )

    n: int = between(1, 256, default=TOKEN_WORKERS)
    """Number of worker processes that prepare batches."""

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield this technique with the number of workers that the batches' pictures or sound need."""
        # Tokens are cheap to prepare, so only floats (pictures, sound) need more workers.
        yield cls(n=min(MOST, max(TOKEN_WORKERS, -(-_bytes_of_floats(job) // BYTES_OF_ONE))))

    @property
    def value(self) -> LoaderWish:
        """Return the DataLoader settings: n worker processes, and batches in pinned memory."""
        return LoaderWish(workers=self.n, pinned=True)


def _bytes_of_floats(job: Job) -> int:
    """Return the bytes of pictures or sound in a batch, in fp32; 0 for a user's module, whose loader is
    unknown.
    """
    if job.model.module is not None or inputs_of(job.task, job.model.architecture).takes_tokens:
        return 0
    import torch

    from snugfit.job.batch import SyntheticDataset

    sample = SyntheticDataset(job, 1)[0]
    floats = [value for name, value in sample.items() if name != "labels" and torch.is_tensor(value)]
    return job.batch_size * sum(value.nbytes for value in floats if value.is_floating_point())
