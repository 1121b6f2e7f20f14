"""The physical GPU of a CUDA index: CUDA_VISIBLE_DEVICES, parsed by CUDA's rules.

NVML numbers all GPUs of the machine. CUDA numbers those that CUDA_VISIBLE_DEVICES shows, in its order. The
parent of a measurement needs the physical GPU without touching CUDA, so this file parses the variable. The
rules are those of the CUDA Programming Guide ("CUDA Environment Variables");
torch.cuda._parse_visible_devices agrees:

- The value is a list of indices, or of UUIDs (which may be shortened, if they match one GPU).
- The list ends at the first entry that names no GPU, -1 by custom. A repeated entry empties the list.
- Indices count GPUs by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID. NVML cannot report CUDA's order of speed.
  GPUs of different kinds in that order are refused with a hint at the variable: no wrong GPU is measured.
- CUDA shows only the first MIG device of a partitioned GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from snugfit.errors import GpuError
from snugfit.measurement.nvml import Card, Nvml, NvmlUnavailable

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"


def hides_all(environment: Mapping[str, str]) -> bool:
    """Return True if the user hid every GPU on purpose: an empty CUDA_VISIBLE_DEVICES, or -1 first."""
    value = environment.get(VISIBLE_DEVICES)
    return value is not None and (not value.strip() or value.strip().startswith("-"))


def card_at(nvml: Nvml, environment: Mapping[str, str], index: int = 0) -> Card:
    """Return the card with the CUDA index `index`. Raises `GpuError` when there is none, or it cannot be
    determined."""
    cards = visible_cards(nvml, environment)
    if 0 <= index < len(cards):
        return cards[index]
    value = environment.get(VISIBLE_DEVICES)
    machine = ", ".join(f"{number}: {card}" for number, card in enumerate(nvml.cards())) or "none"
    if value is not None and not cards:
        raise GpuError(
            f"{VISIBLE_DEVICES}={value!r} shows no GPU. This machine has {machine}. Unset the variable, "
            "or name a GPU in it."
        )
    shown = f"{VISIBLE_DEVICES}={value!r} shows" if value is not None else "This machine has"
    raise GpuError(f"GPU index {index}: {shown} {len(cards)}, counted from 0. Name one of these: {machine}.")


def visible_cards(nvml: Nvml, environment: Mapping[str, str]) -> list[Card]:
    """Return the cards that CUDA shows, in CUDA's numbering. Raises `GpuError` where CUDA's order cannot be
    determined."""
    value = environment.get(VISIBLE_DEVICES)
    if value is not None and value.strip().startswith(("GPU-", "MIG-")):
        return _by_uuid(nvml, [entry.strip() for entry in value.split(",")])
    cards = nvml.cards()
    numbers = list(range(len(cards))) if value is None else _numbers(value, len(cards))
    if numbers:
        _refuse_unknown_order(cards, environment)
    return [_first_mig_device(cards[number]) for number in numbers]


def _numbers(value: str, count: int) -> list[int]:
    """Return the GPU indices in CUDA_VISIBLE_DEVICES, up to the first index without a GPU; empty after a
    repeated index.
    """
    numbers: list[int] = []
    for entry in value.split(","):
        # As in CUDA, an index may be followed by other characters.
        digits = re.match(r"\s*\+?(\d+)", entry)
        if not digits or int(digits[1]) >= count:
            break
        if int(digits[1]) in numbers:
            return []
        numbers.append(int(digits[1]))
    return numbers


def _by_uuid(nvml: Nvml, entries: list[str]) -> list[Card]:
    """Return the GPUs of the UUIDs in CUDA_VISIBLE_DEVICES, up to the first UUID without a GPU; empty after a
    repeated one.
    """
    every_card = nvml.cards()
    cards: list[Card] = []
    for entry in entries:
        card = _card_of_uuid(nvml, every_card, entry)
        if card is None:
            break
        if card.uuid in [other.uuid for other in cards]:
            return []
        cards.append(card)
    return cards


def _card_of_uuid(nvml: Nvml, cards: list[Card], entry: str) -> Card | None:
    """Return the GPU of one UUID, which may be abbreviated; None where it matches no GPU or several."""
    if entry.startswith("GPU-"):
        matches = [card for card in cards if card.uuid.lower().startswith(entry.lower())]
        return _first_mig_device(matches[0]) if len(matches) == 1 else None
    try:
        return nvml.card(entry) if entry.startswith("MIG-") else None
    except NvmlUnavailable:
        return None


def _first_mig_device(card: Card) -> Card:
    try:
        return card.first_mig_device()
    except NvmlUnavailable as reason:
        raise GpuError(str(reason)) from None


def _refuse_unknown_order(cards: list[Card], environment: Mapping[str, str]) -> None:
    if len({card.name for card in cards}) > 1 and environment.get(DEVICE_ORDER) != "PCI_BUS_ID":
        listed = ", ".join(str(card) for card in cards)
        raise GpuError(
            f"This machine has different GPUs ({listed}), which CUDA sorts by speed. Their order is not "
            f"known without starting CUDA. Set {DEVICE_ORDER}=PCI_BUS_ID, or {VISIBLE_DEVICES} to a UUID."
        )
