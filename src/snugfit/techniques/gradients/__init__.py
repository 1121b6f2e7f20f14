"""The lifetime of the weights' gradients."""
