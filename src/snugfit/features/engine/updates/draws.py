"""The random generators that a pass draws from, to be set back before the same pass is run again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import torch


@final
class Draws:
    """Current states of all generators, those of the host and of a GPU."""

    def __init__(self, device: torch.device) -> None:
        import numpy
        import torch

        self._device = device
        self._host = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        # The generator of a CPU device is the host's.
        self._gpu: Any = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def set_back(self) -> None:
        """Reset the generators, so that the next draws repeat the earlier ones."""
        import numpy
        import torch

        of_torch, of_python, of_numpy = self._host
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu, self._device)
