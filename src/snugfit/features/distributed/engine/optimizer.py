"""DeepSpeed's engine as an optimizer over the model's own weights, for snugfit's loops.

The engine flattens weights, gradients and states into partitions of its own, and its optimizer updates only
these. Schedules, checkpoints and lists of trained weights use the model's weights by their names. So this
optimizer has the original groups. Its `step` copies their learning rates to the engine's groups, and the
engine clips and updates.

DeepSpeed's own functions (`deepspeed.utils.tensor_fragment`) read and write an fp32 weight and its states,
whole and by the weight's name. The engine makes its fp32 weights from the bf16 ones of the computation. Here
they become the model's weights from before the cast, as in a run without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.nn import functional

from snugfit.features.distributed.engine.loop import make_engine
from snugfit.features.distributed.fields import SHARDING

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

_TOLD = ("lr", "weight_decay", "betas", "eps")
"""Optimizer settings that each step copies from this optimizer's parameter groups to DeepSpeed's."""

_FLAT = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
"""Attributes of DeepSpeed's optimizer with this process's fp32 weights, under ZeRO stage 2 and stage 3."""

_NORMS: tuple[tuple[str, Any], ...] = (
    ("scaled_global_norm", lambda mark: mark),
    ("_get_norm_groups", lambda mark: [mark]),
)
"""Methods of DeepSpeed's optimizer that compute the gradient norm, under ZeRO stage 2 and 3. Each has a
function that wraps the value of a non-finite norm, -1, as its result.
"""


class EngineOptimizer(torch.optim.Optimizer):
    """Wrapper of the optimizer of DeepSpeed's engine. Its `state` is empty except while a checkpoint is
    restored. `take_states` then moves the restored states into the engine.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], engine: Any) -> None:
        super().__init__(groups, defaults)
        self.engine = engine
        self._has_gradients = False

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Run the backward pass of a micro-batch in DeepSpeed's engine; `is_last` marks the last one of a
        step.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        self.engine.backward(loss, scale_wrt_gas=False)
        self._has_gradients = is_last

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip, update and drop the gradients by the engine. If gradients are not finite, no weight is
        updated (`overflowed`).
        """
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: own[name] for name in _TOLD if name in own})
        # The engine's step has dropped the gradients.
        self._has_gradients = False
        self.engine.step()

    @property
    def overflowed(self) -> bool:
        """Return True if the last step's gradients were not finite, so that no weight was updated."""
        return bool(self.engine.optimizer.overflow)

    def norm(self) -> float:
        """Return the global L2 norm of the last step's gradients, before clipping. The host waits for the
        device."""
        return float(self.engine.get_global_grad_norm())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the step's gradients, those in the partitions too. The engine drops these only when it updates
        or finds non-finite values, so its norm is replaced by a non-finite mark.
        """
        optimizer = self.engine.optimizer
        if not self._has_gradients:
            optimizer.zero_grad(set_to_none=set_to_none)
            return
        self._has_gradients = False
        name, answer = next((name, answer) for name, answer in _NORMS if hasattr(optimizer, name))
        mark = torch.tensor(-1.0, device=self.engine.device)  # DeepSpeed's mark for a norm that is not finite
        with patch.object(optimizer, name, lambda: answer(mark)):
            # A step with this norm drops all gradients and changes no weight.
            optimizer.step()
        assert optimizer.overflow, "DeepSpeed would have updated weights"

    # ---- weights and states, whole -----------------------------------------------------------------------

    @property
    def _inner(self) -> Any:
        """Return DeepSpeed's inner optimizer, which updates the partitions."""
        return self.engine.optimizer.optimizer

    def _flat_weights(self) -> list[torch.Tensor]:
        flat = next(name for name in _FLAT if hasattr(self.engine.optimizer, name))
        return list(getattr(self.engine.optimizer, flat))

    def _own_states(self) -> list[dict[str, Any]]:
        """Return the optimizer states of each of this process's partitions, which exist after the first
        update.
        """
        states = self._inner.state
        return [states[flat] for flat in self._flat_weights() if states.get(flat)]

    def state_names(self) -> list[str]:
        """Return the names of optimizer states with one element per weight element (`exp_avg`); empty before
        the first update.
        """
        states = self._own_states()
        return [name for name, value in states[0].items() if is_of_weights(value)] if states else []

    def step_count(self) -> torch.Tensor | None:
        """Return the number of updates so far as a tensor, the form of torch's AdamW; None
        before the first.
        """
        states = self._own_states()
        if not states:
            return None
        count = states[0]["step"]
        # torch's AdamW counts steps in a tensor, DeepSpeed's Adam for the host in an integer.
        if isinstance(count, torch.Tensor):
            return count.detach().clone()
        return torch.tensor(float(count), device=self.engine.device if self._is_fused else "cpu")

    @property
    def _is_fused(self) -> bool:
        return bool(self.param_groups[0].get("fused"))

    def take_states(self) -> None:
        """Move the restored optimizer states of whole weights from `state` into DeepSpeed's partitions.
        Afterwards `state` is empty.
        """
        given = {weight: dict(values) for weight, values in self.state.items()}
        self.state.clear()
        if not given:
            return
        names = {name for values in given.values() for name, value in values.items() if is_of_weights(value)}
        # The engine counts updates per partition, so all weights of a partition have one count.
        self.begin_states(names, max(float(values.get("step", 0)) for values in given.values()))
        # States are written into the memory that `begin_states` has allocated in the partitions.
        for weight, values in given.items():
            for name in names & values.keys():
                self.put_state(weight, name, values[name])

    def begin_states(self, names: Collection[str], steps: float) -> None:
        """Create missing optimizer states of these names in the partitions, filled with zeros. Set the number
        of updates to `steps`.
        """
        is_torchs = isinstance(self._inner, torch.optim.AdamW)
        for flat in self._flat_weights():
            state = self._inner.state[flat]
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(flat.detach())
            count = torch.tensor(steps, device=flat.device if self._is_fused else "cpu")
            state["step"] = count if is_torchs else int(steps)
        if not is_torchs:
            self._count_on_host(int(steps))
        # ZeRO stage 2 links weights to states after its first update, which has not happened yet.
        if hasattr(self.engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _count_on_host(self, steps: int) -> None:
        """Set the update count of DeepSpeed's CPU Adam to `steps`, by as many updates of a one-element
        tensor. Its compiled part keeps the powers of both betas by multiplying, in fp32. For any other start
        it uses `pow`, which rounds differently.
        """
        number = [torch.zeros(1) for _ in range(4)]  # a weight, its gradient and two moments
        group = self._inner.param_groups[0]
        for step in range(1, steps + 1):
            self._inner.ds_opt_adam.adam_update(
                self._inner.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, True, *number
            )

    def put_state(self, weight: Any, name: str, value: torch.Tensor) -> None:
        """Copy one optimizer state of a whole weight into DeepSpeed's partitions; call `begin_states`
        first.
        """
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if hasattr(weight, "ds_id"):
            safe_set_local_optimizer_state(weight, _own_part(weight, value), name)
        else:
            safe_set_full_optimizer_state(weight, value, name)


def is_of_weights(value: Any) -> bool:
    """Return True if an optimizer state is as large as its weight; False for single numbers."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def start_engine(
    job: Job, setup: Setup, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, EngineOptimizer]:
    """Return DeepSpeed's engine and its wrapped optimizer, around `model`, which is on the host in fp32.
    `job` has the batch of one process.
    """
    # The engine replaces the weights in parameter groups by its partitions, so the lists are copied.
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    # These views still have the fp32 values after the engine has cast the weights.
    before = [(weight, weight.detach()) for weight in model.parameters() if weight.requires_grad]
    engine = make_engine(job, setup, model, optimizer)
    wish = SHARDING.of(setup)
    assert wish is not None
    # In fp32 the engine casts nothing.
    if wish.dtype != "float32":
        for weight, value in before:
            _put_weight(weight, value)
    return engine, EngineOptimizer(groups, dict(optimizer.defaults), engine)


def _put_weight(weight: Any, value: torch.Tensor) -> None:
    """Copy a value into the fp32 copy of a weight in DeepSpeed's partitions."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if hasattr(weight, "ds_id"):
        safe_set_local_fp32_param(weight, _own_part(weight, value))
    else:
        safe_set_full_fp32_param(weight, value)


def _own_part(weight: Any, value: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor under ZeRO stage 3: an equal part, the last one padded."""
    import torch.distributed as dist

    size, rank = weight.ds_tensor.numel(), dist.get_rank(group=weight.ds_process_group)
    part = value.reshape(-1)[rank * size : (rank + 1) * size]
    return functional.pad(part, (0, size - part.numel()))


def whole_weight(weight: Any) -> torch.Tensor:
    """Return a trained weight in fp32, gathered from DeepSpeed's partitions; other weights are returned
    unchanged. All processes call it.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    # Only trained weights have fp32 copies in the partitions.
    if weight.requires_grad:
        gathered: torch.Tensor = safe_get_full_fp32_param(weight)
        return gathered
    if not hasattr(weight, "ds_id"):
        return weight.detach()  # type: ignore[no-any-return]
    with deepspeed.zero.GatheredParameters([weight]):
        return weight.detach().clone()  # type: ignore[no-any-return]


def whole_states(optimizer: EngineOptimizer, weight: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each optimizer state of a weight by name, gathered from all processes. All of them must call
    it.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    for name in optimizer.state_names() if weight.requires_grad else ():
        yield name, safe_get_full_optimizer_state(weight, name)
