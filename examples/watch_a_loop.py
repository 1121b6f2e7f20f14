"""Watches a plain PyTorch loop while it runs, and predicts the same step. With or without a GPU."""

import torch
from torch import nn

import snugfit


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 2048), nn.GELU(), nn.Linear(2048, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(pixels), labels)


device = "cuda" if torch.cuda.is_available() else "cpu"
batch = {"pixels": torch.randn(256, 784), "labels": torch.randint(10, (256,))}

model = snugfit.Model.from_module(Classifier(), {name: tensor[:1] for name, tensor in batch.items()})
job = snugfit.Job(model=model, task="custom", batch_size=256)
print("predicted, by kind:")
for row in snugfit.predict(job).to_rows():
    print(f"  {row['kind']:18} {row['bytes'] / 2**20:8.2f} MiB  {row['reason']}")

module = Classifier().to(device)
optimizer = torch.optim.AdamW(module.parameters())
with snugfit.watch() as watched:
    for _ in range(20):
        loss = module(**{name: tensor.to(device) for name, tensor in batch.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {loss.item():.2f}; watched:")
print(watched)
