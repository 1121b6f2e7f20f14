"""The feature `diagnosis`: the command `why-oom`, which explains a run that ended out of memory."""
