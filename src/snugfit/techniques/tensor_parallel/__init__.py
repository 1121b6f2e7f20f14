"""The slot `tensor_parallel`: the matrices of each layer are whole on one GPU, or sharded over several. One
technique a file.
"""
