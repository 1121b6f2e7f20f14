"""Recurrent layers are predicted from torch's composite implementation, with a warning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.composites import RECURRENT_DOUBT
from snugfit.report.text.terminal import as_text
from tiers import crossed


class Tagger(nn.Module):
    """A recurrent network over sequences, whole or packed."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.network = nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            lengths = torch.tensor([7, 5, 3, 1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.network(packed)[0], batch_first=True)
        else:
            out = self.network(x)[0]
        return self.head(out).pow(2).mean()


@pytest.mark.parametrize(("packed", "recipe"), crossed([False, True], ["plain", "bf16"]))
def test_an_lstm_is_predicted_with_a_warning(packed: bool, recipe: str) -> None:
    model = Model.from_module(Tagger(packed), {"x": torch.ones(4, 7, 16)})
    prediction = predict(Job(model=model, task=Task.CUSTOM, batch_size=4), recipe, gpu="h200")
    assert prediction.doubts == (RECURRENT_DOUBT,)
    assert "reserve are not simulated" in " ".join(as_text(prediction).split())
