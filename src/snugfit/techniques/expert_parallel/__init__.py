"""The slot `expert_parallel`: whether GPUs share the experts of each layer. One technique a file."""
