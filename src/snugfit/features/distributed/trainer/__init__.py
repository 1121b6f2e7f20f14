"""Support for a user's HF Trainer that runs in several processes, under DDP or FSDP2."""
