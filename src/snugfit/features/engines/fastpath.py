"""torch's fast path of encoders: one C++ operator computes a whole encoder layer of a model such as BERT.

`nn.TransformerEncoderLayer` has this path, and transformers' own layers do not. So each layer's weights are
passed to the operator (`torch._transformer_encoder_layer_fwd`). Query, key and value become one matrix
product. The operator supports layers like BERT's: norms after the attention and after the MLP, and GELU or
ReLU between. Padding at the end of samples is not computed. Its hidden states are zeros.

The operator's inner buffers are no tensors, so a simulation cannot record them. Therefore its memory is not
predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.features.engines.evaluation_technique import EvaluationTechnique
from snugfit.features.engines.fields import FAST_LAYERS
from snugfit.techniques.setup import Setup

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class FastPath(EvaluationTechnique):
    """Computes each encoder layer in evaluation by one operator of torch."""

    source: ClassVar = "torch.nn.TransformerEncoderLayer (fast path); Better Transformer, PyTorch 1.12"
    elsewhere: ClassVar = ("bettertransformer", "fast_path")

    def install(self, setup: Setup) -> Setup:
        """Return the setup with the field that replaces encoder layers in evaluation."""
        return setup.with_fields(**{FAST_LAYERS.name: True})

    def objections_to_generation(self, job: Job) -> Iterator[str]:
        """Yield the reason why a job with text generation cannot use this technique."""
        yield "the layers of a decoder have no fast path. Leave it out."
