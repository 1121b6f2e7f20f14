"""Other kernels in a model's modules: which code is changed, for each library and for ours."""
