"""The command `why-oom`: reasons for a run without enough memory."""
