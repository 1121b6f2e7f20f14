"""Repositories of GGUF files, which llama.cpp serves."""

from snugfit.job.repositories import OtherRepository

GGUF = OtherRepository(
    contents="in llama.cpp's format GGUF",
    id_pattern=r"[\w./-]+[-_.]gguf",
    files="*.gguf",
    advice="For the memory of its server, run: snugfit predict FILE.gguf --phase serve --engine llama.cpp "
    "--gpu NAME.",
)
