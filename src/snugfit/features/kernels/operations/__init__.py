"""Operations of a training step as one kernel each: plain torch beside a Triton program.

A file here is an operation: its reference in plain torch, the operator by which its kernels are launched, and
its autograd. On a GPU the operator launches Triton programs (`programs/`); on a CPU the reference does the
same, forward and backward, down to the numbers that dropout draws; on shapes the operator does nothing. What
an operation allocates, its autograd allocates by torch, so that a rehearsal sees each tensor.
"""
