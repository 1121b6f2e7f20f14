"""What the process that workers are copies of imports first: from here on, what nobody can act on is not
logged in it, nor in them. No user's own code runs there."""

from __future__ import annotations

from snugfit.hub_kernels import log_only_errors

log_only_errors()
