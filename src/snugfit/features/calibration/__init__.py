"""The examination of a machine: versions, extras, driver and GPUs."""
