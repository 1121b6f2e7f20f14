"""The feature `serving`: memory of inference servers (vLLM, sglang, llama.cpp) at their start."""
