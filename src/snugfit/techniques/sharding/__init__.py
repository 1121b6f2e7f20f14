"""The slot `sharding`: weights, gradients and optimizer states on the GPU alone, or by DeepSpeed on the host
or other GPUs.
"""
