"""Entry points of training: `snugfit.train`, and parts that the HF Trainer and custom loops share."""
