"""Operations of a training step in one kernel each: a Triton program, and its reference in plain torch.

Each file is one operation: its reference in plain torch, the operator that launches its kernels, and its
autograd function. On a GPU the operator launches Triton programs (`programs/`). On a CPU the reference
computes the same, forward and backward, down to the random numbers of dropout. On `meta` tensors the operator
does nothing. The autograd function allocates all tensors by torch, so that a simulation records each of them.
"""
