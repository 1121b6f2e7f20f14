"""The feature `diagnosis`: the command `why-oom`, which explains a run without enough memory."""
