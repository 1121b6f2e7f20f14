"""The feature `calibration`: measured rates of this machine's GPU and host, for predictions."""
