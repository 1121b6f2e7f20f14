"""The slot `kernels`: the kernels of a model's layers, torch's or another library's."""
