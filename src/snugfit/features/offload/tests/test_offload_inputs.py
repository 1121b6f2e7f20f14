"""Plans put the inputs of recomputed layers on the host, if attention's results fit the GPU only then."""

from __future__ import annotations

import pytest

from small_models import small_job
from snugfit.features.offload.fields import OFFLOAD, OffloadWish
from snugfit.planning.search.search import plan
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

FIXED = "lora(r=4) + bf16_pure + chunked_loss + torch_kernels + uncompiled + adamw + expandable"
KEPT = f"{FIXED} + selective(attention)"
WIDE = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}


def test_attention_is_kept_where_inputs_leave_room_for_it() -> None:
    job = small_job("llama", 4, facts=WIDE, batch_size=1, sequence_length=65536)
    whole, sent = (
        predict(job, f"{KEPT}{more}", gpu="h200").footprint.nvml_bytes or 0
        for more in ("", " + host(checkpoints)")
    )
    assert 0 < sent < whole
    found = plan(job, gpu="h200", memory_bytes=(whole + sent) // 2, keep=FIXED, workers=1)
    assert found.best is not None
    recipe = Recipe.parse(found.best.recipe)
    assert recipe[Slot.CHECKPOINTING] == Recipe.parse(KEPT)[Slot.CHECKPOINTING]
    assert OFFLOAD.of(recipe.setup()) == OffloadWish(what="checkpoints")
