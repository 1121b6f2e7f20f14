"""The slot `pipeline_parallel`: all layers on each GPU, or consecutive ones on several."""
