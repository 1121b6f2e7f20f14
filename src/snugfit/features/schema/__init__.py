"""The command `snugfit schema`: the JSON Schema of the documents that commands print with `--json`."""
