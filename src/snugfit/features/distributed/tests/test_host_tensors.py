"""Tests of tensors on the host in a simulation."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from snugfit.features.distributed.simulate.host_tensors import HostTensors


def test_shapes_that_dtensor_asks_for_on_the_host_are_no_tensors_there() -> None:
    """DTensor names no device for them (`_rebuild_tensor_from_dtensor_meta`)."""
    host = HostTensors(lambda tensor, dtype: tensor.to(dtype))
    with host:
        with FakeTensorMode():
            asked = torch.empty_strided((64, 64), (64, 1))
            assert isinstance(asked.sqrt(), FakeTensor)
        assert host.most == 0
        made = torch.empty_strided((64, 64), (64, 1))
        assert host.holds(made)
        assert host.most == made.nbytes
