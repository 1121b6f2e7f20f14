"""Test tensors on the simulated host."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from snugfit.features.distributed.simulate.host_tensors import HostTensors


def test_shapes_that_dtensor_asks_for_on_the_host_are_no_tensors_there() -> None:
    """DTensor creates such tensors without a device (`_rebuild_tensor_from_dtensor_meta`), only to compute
    shapes.
    """
    host = HostTensors(lambda tensor, dtype: tensor.to(dtype))
    with host:
        with FakeTensorMode():
            asked = torch.empty_strided((64, 64), (64, 1))
            assert isinstance(asked.sqrt(), FakeTensor)
        assert host.most == 0
        made = torch.empty_strided((64, 64), (64, 1))
        assert host.holds(made)
        assert host.most == made.nbytes
