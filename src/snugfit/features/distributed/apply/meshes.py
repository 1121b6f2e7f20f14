"""Operations on norms and lists of tensors that mix whole tensors with shards (`DTensor`) over different
device meshes.

Under tensor parallelism matrices are sharded over some ranks, and norms are whole in each. With FSDP2
matrices are sharded along two axes of the mesh and norms along one. torch's operators on lists of tensors
take those of one mesh alone. So an optimizer has a parameter group for each mesh, as in transformers'
Trainer. The norm of all gradients is computed from the norms of the meshes. With a single mesh, torch's
functions are called as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.apply.rank_mesh import is_part, mesh, own_part
from snugfit.hub_kernels import quiet
from snugfit.step.clipping import TensorParts

if TYPE_CHECKING:
    import torch


def split(tensors: Iterable[torch.Tensor], key: Callable[[Any], Any]) -> list[list[torch.Tensor]]:
    """Return the tensors in groups whose values of the function `key` are equal, in the order of each group's
    first tensor.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.values())


class MeshParts(TensorParts):
    """Norms and gathered copies of tensors, some of which are sharded over meshes of ranks."""

    is_part = staticmethod(is_part)
    own = staticmethod(own_part)

    def whole(self, tensor: Any) -> torch.Tensor:
        """Return the full tensor of a `DTensor`, gathered from all ranks, or an ordinary tensor itself."""
        gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return gathered

    def groups(self, tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the tensors in groups, one for each mesh of ranks over which they are sharded."""
        return split(tensors, mesh)

    def total_norm(self, tensors: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all tensors taken as one vector. The result is a `DTensor` if all tensors are
        sharded over one mesh.
        """
        import torch

        tensors = list(tensors)
        if len(self.groups(tensors)) == 1:
            return super().total_norm(tensors, norm_type)
        alike = split(tensors, lambda tensor: (mesh(tensor), getattr(tensor, "placements", None)))
        with quiet("torch.distributed.tensor._redistribute"):  # torch advises to sum along both axes at once
            norms = [self.whole(torch.nn.utils.get_total_norm(part, norm_type)) for part in alike]
        return torch.nn.utils.get_total_norm(norms, norm_type)
