"""The feature `calibration`: measured hardware rates of this machine's GPU and host, such as bytes per
second.
"""
