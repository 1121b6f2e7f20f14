"""An optimizer step that is recorded as CUDA graphs, and replayed."""
