"""The probes of a calibration: small experiments, each of which one resource bounds.

One GPU is probed for the host, the bandwidth and matrix products. Several GPUs of a host are probed for the
host while all of them work. Concurrent processes took up to 1.5 times as long to launch kernels as one alone.
This was measured on shared hosts of two and four H200s (2026-11-26).

The shortest host probe is omitted on several GPUs, because DDP's work once per step weighs in it. On two
hosts of two H100s it took 1.3 and 1.6 times its prediction. The other two took 1.05 to 1.09 times theirs
(results/h100-2026-11-26). Three more probes calibrate FSDP2's hooks, all-reduces of gradients, and
all-gathers of weights with reduce-scatters of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.trace.trace import ALL_GATHER, ALL_REDUCE

HOST, BANDWIDTH, SHARDING = "host", "bandwidth", "sharding"
"""Rates that a probe may correct, besides precisions of matrix products and collectives.

`host` are all seconds of the host, `bandwidth` is the GPU's memory, `sharding` the host's seconds for sharded
weights.
"""

EXCHANGES = (ALL_REDUCE, ALL_GATHER)
"""The two calibrated kinds of collectives: all-reduce, and all others."""

PROBE_ERRORS = {"host": 0.97, "bandwidth": 1.04, "fp32": 0.955, "tf32": 1.03, "bf16": 1.05}
"""Measured / predicted seconds of each probe, on the H200 and the host that gave the package's rates.

The rates were fitted to all kernels of that H200 and to all families on its host (2026-11-21 and 22). The
remaining error is the probe's own and does not transfer to another machine. A Llama's steps take the host
three per cent less, relative to their prediction, than the thirteen families' steps.
"""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A small experiment that corrects one rate."""

    corrects: str
    """`host`, `bandwidth`, `sharding`, a precision of matrix products, or a collective by NCCL's name."""
    job: Job
    recipe: str
    gpus: int = 1
    """Number of GPUs that train it; the job's batch contains all their samples."""

    @property
    def is_of_host(self) -> bool:
        """True when the probe corrects seconds of the host."""
        return self.corrects in (HOST, SHARDING)


def probes(precisions: tuple[str, ...], gpus: int = 1) -> tuple[Probe, ...]:
    """Return the probes for this number of GPUs with these precisions, in the order of correction."""
    small = _llama(layers=16, width=512, vocabulary=8_000, batch=4, length=64)
    table = _llama(layers=1, width=2048, vocabulary=100_000, batch=1, length=8)
    wide = _llama(layers=4, width=2048, vocabulary=1_000, batch=16, length=512)
    recipes = {"fp32": "sgd", "tf32": "tf32 + sgd"}
    recipes |= {"bf16": "bf16_pure + sgd"} if "bf16" in precisions else {"fp16": "fp16 + sgd"}
    of_host = ("sgd", "bf16 + every_layer", "eager + bf16")
    alone = (
        Probe(corrects=BANDWIDTH, job=table, recipe="adamw"),
        *(Probe(corrects=name, job=wide, recipe=recipes[name]) for name in recipes if name in precisions),
    )
    if gpus == 1:
        return (*(Probe(corrects=HOST, job=small, recipe=recipe) for recipe in of_host), *alone)
    of_all = replace(small, batch_size=small.batch_size * gpus)
    table_of_all = replace(table, batch_size=table.batch_size * gpus)
    return (
        *(Probe(corrects=HOST, job=of_all, recipe=f"{recipe} + ddp", gpus=gpus) for recipe in of_host[1:]),
        *alone,
        Probe(corrects=SHARDING, job=of_all, recipe="adamw + fsdp", gpus=gpus),
        Probe(corrects=ALL_REDUCE, job=table_of_all, recipe="sgd + ddp", gpus=gpus),
        Probe(corrects=ALL_GATHER, job=table_of_all, recipe="sgd + fsdp", gpus=gpus),
    )


def _llama(*, layers: int, width: int, vocabulary: int, batch: int, length: int) -> Job:
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
    }
    model = Model.from_config(config, name=f"probe-{layers}x{width}")
    return Job(model=model, task=Task.CAUSAL_LM, batch_size=batch, sequence_length=length)
