"""Operators that autocast casts, by device, from torch's own lists.

Source: `aten/src/ATen/autocast_mode.h` and `autocast_mode.cpp`, torch 2.13 (BSD-3). For CUDA these are the
operators under AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and
AT_FORALL_PROMOTE. For the CPU they are its own registrations. An older torch casts fewer of them, so the
lists are filtered by the installed one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class AutocastLists:
    """Names of operators by autocast's treatment of their floating-point arguments."""

    lower: tuple[str, ...]
    """Operators whose arguments are cast to the autocast dtype."""
    fp32: tuple[str, ...]
    """Operators whose arguments are cast to fp32."""
    fp32_result: tuple[str, ...]
    """Operators whose half-precision inputs are unchanged, and whose result has dtype fp32."""
    promote: tuple[str, ...]
    """Operators whose arguments are cast to the widest dtype among them."""
    key: str
    """Dispatch key under which each build of torch has autocast kernels for these operators."""

    def of_installed_torch(self, names: Iterable[str]) -> Iterator[str]:
        """Yield those of these operators that the installed torch has and that its autocast casts."""
        import torch

        for name in names:
            with contextlib.suppress(RuntimeError):  # raised for a missing operator
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", self.key):
                    yield name


def _names(words: str) -> tuple[str, ...]:
    """Split a text with several lines into a tuple of operator names."""
    return tuple(words.split())


_CONVOLUTIONS = """
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
"""

CUDA = AutocastLists(
    key="AutocastCUDA",
    lower=_names(
        _CONVOLUTIONS
        + """
        _convolution _convolution.deprecated _scaled_dot_product_flash_attention convolution prelu addmm
        addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
        _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        scaled_dot_product_attention
        """
    ),
    fp32=_names(
        """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
        nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
        margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp rms_norm upsample_bicubic2d
        upsample_bilinear2d upsample_linear1d upsample_trilinear3d upsample_nearest1d upsample_nearest2d
        upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa
        """
    ),
    fp32_result=_names(
        """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord cumprod.dimname cumsum.dimname prod.dim_Dimname
        sum.dim_DimnameList softmax.Dimname log_softmax.Dimname
        """
    ),
    promote=_names(
        """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
        """
    ),
)

CPU = AutocastLists(
    key="AutocastCPU",
    lower=_names(
        _CONVOLUTIONS
        + """
        bmm mm linalg_vecdot baddbmm addmm addbmm linear _convolution.deprecated matmul
        scaled_dot_product_attention _native_multi_head_attention
        """
    ),
    fp32=_names(
        """
        avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int quantile nanquantile stft cdist
        trace view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse
        max_pool3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss poisson_nll_loss
        smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss ctc_loss.IntList ctc_loss.Tensor kl_div multilabel_margin_loss
        binary_cross_entropy_with_logits
        """
    ),
    fp32_result=(),
    promote=_names(
        """
        stack cat index_copy
        """
    ),
)
