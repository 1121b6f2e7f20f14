"""What cuDNN allocates for recurrent layers: weights in one buffer, what it keeps for backward, workspaces.

cuDNN names these sizes on the device alone (`cudnnGetRNNWeightSpaceSize`, `cudnnGetRNNTempSpaceSizes`). So
they were read off one H200 (cuDNN 9.19, torch 2.11) for 290 drawn layers, and for 157 with packed sequences
or dropout (`results/h200-2026-11-22/recurrent-layers.json` and `recurrent-layers-packed.json`). In elements,
of T steps, B samples, I inputs, hidden width H (projected to P), L layers, D directions and G gates:

- weights: the layers' matrices and both biases, also where a layer has none. Exact.
- reserve: G + 1 a hidden unit for LSTM (its gates and cell), 6 for GRU, 1 for the plain RNN; the outputs
  between layers; a bit for each that dropout may drop; H + P with projections. Exact but for roundings of
  some 16 bytes.
- workspace: 8 MiB and the matrices of each layer and direction, some vectors of B x H, and mostly as many
  copies of the sequence as `_copies_of_sequence` says. Right to 0.01 % in the median, to 1 % in nine of ten,
  to 30 % at worst. Where sequences are packed it is that of `_packed_elements`, exact for 79 of 85 layers and
  24 % too large at worst.

The algorithm is torch's choice (`get_algo`, `native/cudnn/RNN.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from snugfit.units import MIB

if TYPE_CHECKING:
    import torch

MODES = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")
"""cuDNN's numbers of the kinds (`torch.backends.cudnn.rnn.get_cudnn_mode`)."""

GATES = {"LSTM": 4, "GRU": 3}
_KEPT = {"LSTM": 5, "GRU": 6}
_SMALL = {True: {"LSTM": 192, "GRU": 192}, False: {"LSTM": 128, "GRU": 128}}
_SMALL_RNN = {True: 384, False: 256}
"""The widest hidden layer of the algorithm for small ones, forward and backward."""

_OF_ONE_LAYER = 8 * MIB


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    """A recurrent network and its input, as cuDNN's descriptors name them."""

    kind: str
    """Which of `MODES` it is."""
    steps: int
    """T, the length of the longest sequence."""
    batch: int
    """B, the number of sequences."""
    inputs: int
    """I, the width of the input."""
    hidden: int
    """H, the width of a hidden state."""
    projected: int
    """P, to which hidden states are projected, or 0."""
    layers: int
    """L, the number of layers."""
    directions: int
    """D, which is 2 where it reads both ways."""
    dtype: torch.dtype
    """The dtype of input and weights."""
    drops: bool = False
    """Whether dropout is on between layers."""
    tokens: int = 0
    """The steps of all sequences together where they are packed, so that each ends at its own length."""

    @property
    def gates(self) -> int:
        """G, the number of gates."""
        return GATES.get(self.kind, 1)

    @property
    def outputs(self) -> int:
        """The width of one direction's output."""
        return self.projected or self.hidden

    @property
    def _units(self) -> int:
        return (self.tokens or self.steps * self.batch) * self.dtype.itemsize

    def matrix_elements(self) -> int:
        """How many elements all weights have without biases."""
        width, elements = self.inputs, 0
        for _ in range(self.layers):
            of_one = self.gates * self.hidden * (width + self.outputs) + self.projected * self.hidden
            elements += self.directions * of_one
            width = self.outputs * self.directions
        return elements

    def weight_elements(self) -> int:
        """How many elements the buffer of all weights has."""
        return self.matrix_elements() + self.layers * self.directions * 2 * self.gates * self.hidden

    def reserve_bytes(self) -> int:
        """Bytes that a training pass keeps for its backward pass."""
        of_layer = _KEPT.get(self.kind, 1) * self.hidden
        if self.projected:
            of_layer += self.hidden + self.projected
        between = (self.layers - 1) * self.directions * self.hidden
        dropped = 0
        if self.drops:
            bits = self.steps * self.batch * self.directions * self.outputs
            dropped = (self.layers - 1) * self.directions * (-(-bits // 256) * 32)
        return self._units * (self.layers * self.directions * of_layer + between) + dropped + 256

    def workspace_bytes(self, multiprocessors: int, *, forward: bool) -> int:
        """Bytes that the kernels of one pass hold while they run."""
        parts = self.layers * self.directions
        weights = _OF_ONE_LAYER * parts + self.matrix_elements() * self.dtype.itemsize
        if self.tokens:
            return weights + self._packed_elements() * self.dtype.itemsize + 256
        vectors = (8 + 2 * self.directions) if self.kind == "LSTM" else (3 + 2 * self.directions)
        return (
            weights
            + round(self._units * self._copies_of_sequence(self._algorithm(multiprocessors, forward=forward)))
            + self.batch * self.hidden * parts * self.dtype.itemsize * vectors
        )

    def _packed_elements(self) -> int:
        """Elements of the workspace beside the weights where sequences are packed: those of the gates, or
        those of the widest layer's sequence, whichever are more."""
        hidden, layers, both = self.hidden, self.layers, self.directions - 1
        wide, lstm, several = hidden * self.directions, self.kind == "LSTM", layers > 1
        state = layers * self.batch * hidden
        projected = wide if self.projected else 0
        dropped = hidden if self.drops and several and not both else 0
        of_gates = self.gates * wide + 4 * both * hidden + dropped + projected
        gates = self.tokens * of_gates + state * ((6 if lstm else 3) * self.directions + 4 * both)
        between = wide if both and several else 0
        of_input = wide + self.directions**2 * max(self.inputs, hidden) + between + projected
        sequence = self.tokens * of_input + state * ((3 if lstm else 1) * self.directions + 4 * both)
        return max(gates, sequence) if self.gates > 1 else sequence

    def _copies_of_sequence(self, algorithm: str) -> float:
        """Elements of the workspace for each step of each sample."""
        hidden, inputs, both = self.hidden, self.inputs, self.directions == 2
        wider = max(inputs, hidden)
        small = algorithm == "small" and str(self.dtype) != "torch.bfloat16"  # there cuDNN takes the other
        between = (self.layers > 1 and (both or self.drops or small)) or (both and self.kind == "GRU")
        extra = self.directions * hidden if between else 0
        if self.kind == "LSTM":
            if both:
                return 9.34 * hidden + 4.66 * wider + inputs + (16 * hidden if small else 0)
            if small:
                return 15 * hidden + 2 * max(inputs, 3 * hidden) + inputs + extra
            return (17 if algorithm == "persistent" else 3) * hidden + inputs + 2 * wider + extra
        copies = 3 * self.directions * hidden + self.directions**2 * wider + 2 * inputs + extra
        return copies + (small and (14 if self.kind == "GRU" else 9) * hidden)

    def _algorithm(self, multiprocessors: int, *, forward: bool) -> str:
        """`small`, `persistent` or `standard`: `get_algo`, for GPUs from sm_80 on."""
        low = str(self.dtype) == "torch.float16"
        if self.projected:
            return "standard"
        widest = _SMALL[forward].get(self.kind, _SMALL_RNN[forward])
        if str(self.dtype) != "torch.float64" and self.hidden <= widest:
            return "small"
        one = self.layers == self.directions == 1
        aligned = self.hidden % 128 == 0 and self.inputs % 128 == 0 and self.hidden <= 1024
        fits = self.batch % 8 == 0 and self.batch <= 128 and multiprocessors >= 98
        if self.kind != "LSTM":
            fits = fits and self.kind != "GRU" and (self.batch < 96 or self.hidden < 896)
        return "persistent" if low and one and aligned and fits else "standard"
