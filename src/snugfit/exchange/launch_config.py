"""What `accelerate launch` is told of the processes it starts: the file that `accelerate config` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def launch_config(script: Mapping[str, Any]) -> str:
    """The YAML file beside a script with these values (`script_values`)."""
    import yaml

    config = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": script["mixed"],
        "num_machines": 1,
        "num_processes": script["gpus"],
        "use_cpu": False,
    }
    parallel = script["parallel"]
    if parallel:
        config |= (
            _fsdp_settings(parallel)
            if parallel["weights"] == "sharded"
            else {"distributed_type": "MULTI_GPU"}
        )
    text: str = yaml.safe_dump(config, sort_keys=True)
    return text


def _fsdp_settings(parallel: Mapping[str, Any]) -> dict[str, Any]:
    """FSDP2, whose groups are the layers; several copies are a mesh of accelerate's `ParallelismConfig`."""
    fsdp = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(parallel["layers"]),
        "fsdp_reshard_after_forward": parallel["reshard"] != "none",
        "fsdp_offload_params": parallel["on_host"],
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if "replicate" not in parallel["mesh"]:
        return {"distributed_type": "FSDP", "fsdp_config": fsdp}
    mesh = {f"parallelism_config_dp_{axis}_size": count for axis, count in parallel["mesh"].items()}
    return {"distributed_type": "FSDP", "fsdp_config": fsdp, "parallelism_config": mesh}
