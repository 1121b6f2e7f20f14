"""The slot `gradients`: the lifetime of the weights' gradients."""
