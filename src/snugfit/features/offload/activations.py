"""Activation offloading: tensors that layers save for the backward pass are copied to the host and back.

Autograd's hooks on saved tensors see everything that a forward pass saves. The tensors that a layer of the
model's stacks saves, or a checkpoint saves as its input, are copied to the host.

A region is a group of tensors that are copied together: one layer's, or one input of a checkpoint. When a
region is full its copies start, and the region before it is awaited and leaves the device. So two regions at
most are on the device, at any speed of the link. The last region stays. When the backward pass reaches a
region, the copies of the region before it start.

If only the first few layers are offloaded, each copy has more time (`Window`).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from snugfit.errors import RecipeError
from snugfit.features.offload.host_link import link_to_host
from snugfit.step.checkpointing import layer_stacks
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    import torch

    from snugfit.features.offload.fields import OffloadWish
    from snugfit.features.offload.host_link import Link
    from snugfit.step.host_link import Extent

LEAST_BYTES = 1 << 20
"""Smallest size in bytes of a storage that is offloaded (chosen). Up to this size, CUDA's allocator places
tensors in shared blocks of 2 MiB. Also, the host takes longer to launch a copy than most kernels.
"""

CHECKPOINTS = "torch.utils.checkpoint"
"""Name of torch's module that saves the inputs of checkpoints."""


class PendingCopy:
    """A copy from the host to the device that may still be running. Later launches wait for it once."""

    __slots__ = ("event", "link", "over")

    def __init__(self, link: Link, event: Any) -> None:
        self.link, self.event, self.over = link, event, False

    def wait(self) -> None:
        """Make launches after this call wait for the end of the copy."""
        if not self.over:
            self.link.wait(self.event)
            self.over = True


class OffloadedStorage:
    """A tensor storage that is offloaded to the host; `base` is its tensor while it is on the device."""

    __slots__ = ("__weakref__", "base", "dtype", "extent", "link", "pending", "version")

    def __init__(self, link: Link, base: torch.Tensor) -> None:
        self.link = link
        self.base: torch.Tensor | None = base
        self.dtype, self.version = base.dtype, base._version
        self.extent: Extent | None = None
        """Host memory that holds the copy; None before the first copy."""
        self.pending: PendingCopy | None = None
        """Copy to the device that created `base` and may be running; None without one."""

    def tensor(self) -> torch.Tensor:
        """Return the tensor on the device, to be read by later launches."""
        assert self.base is not None
        if self.pending is not None:
            self.pending.wait()
        return self.base

    def __del__(self) -> None:
        """Free the host memory at once, and the device memory once no copy writes there."""
        if self.pending is not None:
            self.pending.wait()
        # The allocator may reuse this memory, so a pending copy into it must be done.
        if self.extent is not None:
            self.link.slabs.give_back()


class Region:
    """The saved activations of one layer, which are copied to the host and back together."""

    def __init__(self, before: tuple[Region, ...]) -> None:
        self.before = before
        """Regions to copy back to the device when the backward pass reaches this one."""
        # Weak references, because autograd alone decides how long a storage is needed.
        self.members: dict[int, weakref.ref[OffloadedStorage]] = {}  # by identity
        self.sent: Any = None
        """Event after which the region's storages are on the host, so that device memory can be freed."""

    def live_storages(self) -> list[OffloadedStorage]:
        """Return the storages of this group that autograd still needs."""
        return [storage for member in self.members.values() if (storage := member()) is not None]

    def leave_device(self) -> None:
        """Free the device memory of the layer's saved storages, once their copies to the host are done."""
        members = self.live_storages()
        if members and self.sent is not None:
            # The copies of a region run in order, so that one event marks the end of all.
            members[0].link.wait(self.sent)
        for member in members:
            member.base = None


class SavedTensor(NamedTuple):
    """The object that autograd saves in place of an offloaded tensor: its storage, shape and strides."""

    offloaded: OffloadedStorage
    region: Region
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class KeptTensor:
    """The object that autograd saves for a tensor that stays on the device, or whose offloading is
    undecided.
    """

    __slots__ = ("before", "saved", "tensor")

    def __init__(self, tensor: torch.Tensor, before: tuple[Region, ...] = ()) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.before = before
        """Regions to copy back to the device when this tensor is used."""
        self.saved: SavedTensor | None = None
        """Record of the offloaded tensor that replaces this one; None while it stays on the device."""


class Window:
    """Schedule of the copies of each stack's first layers: when their activations are copied to the host, and
    when back. All activations of the other layers are on the device when the backward pass begins. So with n
    offloaded layers, activations may stay on the device while n - 1 further layers run. The peak does not
    rise.
    """

    def __init__(self, stacks: Sequence[Sequence[Any]], first: int) -> None:
        self.first = first
        self._indices = {
            id(layer): (number, index)
            for number, stack in enumerate(stacks)
            for index, layer in enumerate(stack)
        }
        # At most one layer's activations may wait for the others' copies.
        self._lengths = [max(1, len(stack) - first - 1) for stack in stacks]
        self.begin_pass()

    def begin_pass(self) -> None:
        """Reset the state to the start of a forward pass, before the first layer."""
        self._stack = self._index = -1
        self.is_inside = False
        self._waiting: list[tuple[int, Region]] = []  # regions to copy, by the layer's index
        self._filled: dict[int, list[Region]] = {}  # regions by the index of their layer in this stack

    @property
    def stays(self) -> bool:
        """Return True if the saved activations of the current or last layer stay on the device."""
        return self._index >= self.first

    def enter(self, layer: Any) -> None:
        """Record the call of a layer; the same layers may run several times in a pass."""
        stack, index = self._indices[id(layer)]
        # The same layer or an earlier one means that the stack runs again.
        if stack != self._stack or index <= self._index:
            self.end()
        self._stack, self._index, self.is_inside = stack, index, True

    def leave(self) -> None:
        """Record that the forward pass of the current layer has returned."""
        self.is_inside = False
        self._leave_device(self._index - self._lengths[self._stack])

    def end(self) -> None:
        """Record that the last layer of the stack has returned."""
        self._leave_device(self._index)
        self._filled = {}

    def before(self) -> tuple[Region, ...]:
        """Return the groups of saved activations to copy back when the backward pass reaches the current
        layer.
        """
        return tuple(self._filled.get(self._index - self._lengths[self._stack], ()))

    def append(self, region: Region) -> None:
        """Add the complete group of saved activations of the current layer to the schedule."""
        self._waiting.append((self._index, region))
        self._filled.setdefault(self._index, []).append(region)

    def _leave_device(self, last: int) -> None:
        while self._waiting and self._waiting[0][0] <= last:
            self._waiting.pop(0)[1].leave_device()


class ActivationOffload:
    """Hooks that offload the saved tensors of a model's `first` layers of each stack, or of all layers."""

    def __init__(self, tensor_kinds: str, first: int | None = None) -> None:
        from torch.autograd.graph import saved_tensors_hooks

        self.tensor_kinds, self.first = tensor_kinds, first
        self._window: Window | None = None  # None if all layers are offloaded
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._handles: list[Any] = []
        self._links: dict[torch.device, Link] = {}
        self._begin_pass()
        self._in_forward = self._in_layer = False

    def _begin_pass(self) -> None:
        self._region: Region | None = None  # region that tensors are added to
        self._last: Region | None = None  # region that was filled last
        self._known: dict[tuple[int, torch.dtype], tuple[Any, Any]] = {}
        self._weights: frozenset[int] = frozenset()
        self._undecided: list[KeptTensor] = []
        if self._window is not None:
            self._window.begin_pass()

    def attach(self, model: Any) -> None:
        """Offload the model's saved tensors from now on. Raises `RecipeError` for a model without layers."""
        stacks = layer_stacks(model)
        if not stacks:
            raise RecipeError(
                f"{type(model).__name__} has no stack of repeated layers, whose activations could wait on "
                f"the host. Try {roster.plain(Slot.ACTIVATION_OFFLOAD).name!r}."
            )
        add = self._handles.append
        # This hook runs first, so that tensors that other hooks save are offloaded too.
        add(model.register_forward_pre_hook(self._enter, prepend=True))
        # The hooks must also end after an exception.
        add(model.register_forward_hook(self._leave, always_call=True))
        if self.first is not None and any(len(stack) > self.first for stack in stacks):
            self._window = Window(stacks, self.first)
        # Embeddings, head and loss are outside of layers. The backward pass needs their tensors first.
        for layer in (
            layer for stack in stacks for layer in stack if self.tensor_kinds == "all" or self._window
        ):
            add(layer.register_forward_pre_hook(self._enter_layer))
            add(layer.register_forward_hook(self._leave_layer, always_call=True))

    def detach(self) -> None:
        """Stop offloading, and restore the model's earlier forward methods."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffload:
        """Return hooks without effect for a deep copy of the model, which gets hooks of its own."""
        return ActivationOffload("nothing")

    def __reduce__(self) -> tuple[Any, ...]:
        return ActivationOffload, ("nothing",)

    # ---- the model's side --------------------------------------------------------------------------------

    def _enter(self, model: Any, arguments: Any) -> None:
        import torch

        # An evaluation saves no tensors, and a nested call belongs to the outer one.
        if self._in_forward or self.tensor_kinds == "nothing" or not torch.is_grad_enabled():
            return
        self._begin_pass()
        tensors = (*model.parameters(), *model.buffers()) if self.tensor_kinds == "all" else ()
        # Weights stay on the device anyway, so a saved weight is not an activation.
        self._weights = frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
        self._in_forward = True
        self._hooks.__enter__()

    def _leave(self, model: Any, arguments: Any, out: Any) -> None:
        if self._in_forward:
            self._hooks.__exit__(None, None, None)
            self._in_forward = self._in_layer = False
            self._undecided.clear()
            self._fill_up()
            if self._window is not None:
                self._window.end()
            self._known.clear()

    def _enter_layer(self, layer: Any, arguments: Any) -> None:
        if self._in_forward:
            if self._window is not None:
                self._window.enter(layer)
                # A checkpoint saves its input before its layer is called.
                self._decide(self._window)
            self._in_layer = self.tensor_kinds == "all" and not (self._window and self._window.stays)

    def _leave_layer(self, layer: Any, arguments: Any, out: Any) -> None:
        if self._in_forward:
            self._in_layer = False
            self._fill_up()
            if self._window is not None:
                self._window.leave()

    # ---- autograd's side ---------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        # The check inspects the stack frames above, so it must be called here.
        checkpointed, window = _is_saved_by_a_checkpoint(), self._window
        # An operator's own result would keep its graph alive, if no backward pass reaches it.
        tensor = tensor if tensor.grad_fn is None else tensor.detach()
        if not self._is_offloaded(tensor):
            return tensor
        if window is None or (window.is_inside and not window.stays):
            return self._save(tensor, checkpointed=checkpointed) if checkpointed or self._in_layer else tensor
        if not window.is_inside:
            # The layer that decides is called next.
            if checkpointed:
                self._undecided.append(KeptTensor(tensor))
            return self._undecided[-1] if checkpointed else tensor
        before = window.before()
        return KeptTensor(tensor, before) if before else tensor

    def _save(self, tensor: torch.Tensor, *, checkpointed: bool) -> SavedTensor:
        """Save a tensor for the backward pass by offloading its storage, and return its `SavedTensor`. The
        input of a checkpointed layer gets its own group.
        """
        if checkpointed:
            # The region of a checkpoint contains only its input.
            self._fill_up()
        if self._region is None:
            self._region = Region(self._before())
        saved = SavedTensor(
            self._storage_of(tensor, self._region),
            self._region,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )
        if checkpointed:
            self._fill_up()
        return saved

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, KeptTensor):
            for region in saved.before:
                self._bring(region)
            # A tensor that stays on the device marks when other regions are copied back.
            if saved.tensor is not None:
                return saved.tensor
            saved = saved.saved
        if not isinstance(saved, SavedTensor):
            return saved  # type: ignore[no-any-return]
        for region in (saved.region, *saved.region.before):
            self._bring(region)
        base = saved.offloaded.tensor()
        # A storage is copied as a whole, and each tensor is restored with its strides.
        return base.as_strided(saved.size, saved.stride, saved.offset)

    def _is_offloaded(self, tensor: torch.Tensor) -> bool:
        import torch

        # Subclasses and sparse tensors may have several storages.
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= LEAST_BYTES and storage._cdata not in self._weights

    def _storage_of(self, tensor: torch.Tensor, region: Region) -> OffloadedStorage:
        """Return this tensor's storage as an offloaded storage of this layer's group; its copy may have
        started already.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.dtype
        held, known = self._known.get(key, (_nothing, _nothing))
        # A tensor saved by several operators is copied once.
        offloaded: OffloadedStorage | None = known()
        # The address may belong to a newer storage, and an in-place write makes an earlier copy invalid.
        if offloaded is None or held() is not storage or offloaded.version != tensor._version:
            base = tensor.detach() if tensor.requires_grad else tensor
            offloaded = OffloadedStorage(self._link(tensor.device), base)
            self._known[key] = weakref.ref(storage), weakref.ref(offloaded)
        region.members[id(offloaded)] = weakref.ref(offloaded)
        return offloaded

    def _link(self, device: torch.device) -> Link:
        if device not in self._links:
            self._links[device] = link_to_host(device)
        return self._links[device]

    # ---- regions -----------------------------------------------------------------------------------------

    def _fill_up(self) -> None:
        """Complete the current group of saved activations: its copies to the host start, and the device
        memory of the group before it is freed.
        """
        region, self._region = self._region, None
        members = region.live_storages() if region is not None else []
        if region is None or not members:
            return
        # A storage may belong to two regions. It is copied with the first one.
        new = [member for member in members if member.extent is None]
        if new:
            extents, region.sent = new[0].link.send(
                [member.base for member in new if member.base is not None]
            )
            for member, extent in zip(new, extents, strict=True):
                member.extent = extent
        if self._window is not None:
            self._window.append(region)
            return
        if self._last is not None:
            self._last.leave_device()
        self._last = region

    def _before(self) -> tuple[Region, ...]:
        """Return the groups of saved activations to copy back when the backward pass reaches the group that
        starts now.
        """
        if self._window is not None:
            return self._window.before()
        return () if self._last is None else (self._last,)

    def _decide(self, window: Window) -> None:
        """Offload the inputs that activation checkpointing has just saved, or keep them on the device, as the
        beginning layer requires.
        """
        for entry in self._undecided:
            if window.stays or entry.tensor is None:
                entry.before = window.before()
            else:
                entry.saved, entry.tensor = self._save(entry.tensor, checkpointed=True), None
        self._undecided.clear()

    def _bring(self, region: Region) -> None:
        """Start to copy a group's storages back to the device, except those that are there already."""
        on_host = [member for member in region.live_storages() if member.base is None]
        if not on_host:
            return
        link = on_host[0].link
        extents = [member.extent for member in on_host if member.extent is not None]
        bases, event = link.fetch(extents, [member.dtype for member in on_host])
        pending = PendingCopy(link, event)
        for member, base in zip(on_host, bases, strict=True):
            member.base, member.pending = base, pending


def _nothing() -> None:
    """Return None, as a dead weak reference does, in place of a storage that is not offloaded."""


def _is_saved_by_a_checkpoint() -> bool:
    """Return True if torch's checkpoint is saving an input now.

    The checkpoint saves it directly (torch 2.12), or through an autograd function of its own. A simulation
    calls this function when it replaces that autograd function.
    """
    frame: FrameType | None = sys._getframe(2)
    # The checkpoint's own code is at most three frames above the hook.
    for _ in range(3):
        if frame is None or frame.f_globals.get("__name__") == CHECKPOINTS:
            break
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == CHECKPOINTS


def offload_activations(model: Any, wish: OffloadWish | None) -> None:
    """Offload the activations of this model's layers to the host from now on; None stops it."""
    before = _OFFLOADS.pop(model, None)
    if before is not None:
        before.detach()
    if wish is not None:
        _OFFLOADS[model] = offload = ActivationOffload(wish.what, wish.first)
        offload.attach(model)


@contextlib.contextmanager
def hooks_counted(count: Callable[[], None]) -> Iterator[None]:
    """Context in which `count` is called for each call of a hook, when a tensor is saved and when it is used.

    Each call takes as long as an operator that passes through Python. The drawn steps with `host(all)` in
    results/h200-2026-12-01/timed-beside-predictions.json are predicted with it.
    """
    chooses, unpack = ActivationOffload._is_offloaded, ActivationOffload._unpack

    def choose_and_count(offload: ActivationOffload, tensor: torch.Tensor) -> bool:
        count()
        return chooses(offload, tensor)

    def unpack_and_count(offload: ActivationOffload, saved: Any) -> torch.Tensor:
        count()
        return unpack(offload, saved)

    # Not `_pack` itself, which looks at the frames above it.
    counted: Any = {"_is_offloaded": choose_and_count, "_unpack": unpack_and_count}
    with patch.multiple(ActivationOffload, **counted):
        yield


_OFFLOADS: weakref.WeakKeyDictionary[Any, ActivationOffload] = weakref.WeakKeyDictionary()
