"""The slot `tensor_parallel`: whether GPUs share the matrices of each layer. One technique a file."""
