"""The slot `expert_parallel`: the experts of each layer are all on one GPU, or divided over several. One
technique a file.
"""
