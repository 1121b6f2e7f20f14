"""How the kernel cuts its work; apart from it, because a rehearsal has no Triton."""

BLOCK = 4096
"""Elements that one program of the kernel updates (chosen, not measured): 16 for each of its 256 threads."""

WARPS = 8
"""Warps of 32 threads of one program."""
