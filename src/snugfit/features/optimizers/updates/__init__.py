"""Update steps (`torch.optim.Optimizer` classes) of the optimizers of this feature."""
