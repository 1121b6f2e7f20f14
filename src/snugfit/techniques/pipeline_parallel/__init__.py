"""Who keeps weights, gradients and optimizer states: the GPU, or DeepSpeed on the host as well."""
