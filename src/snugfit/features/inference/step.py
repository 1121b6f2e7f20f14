"""The step of text generation: one call of transformers' `generate` for a batch of prompts.

The first forward pass of the model is the phase `prefill`. Each further pass begins a part of the phase
`decode`, which also contains the choice of its token. No sequence ends early, so that each call generates the
same number of tokens.

**Sampling.** Simulation of drawing random tokens, by the operators that torch runs on a device.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from snugfit.errors import UsageError
from snugfit.features.inference.settings import GenerationSettings
from snugfit.results.footprint import Kind
from snugfit.step.batches import place
from snugfit.step.plain_loop import PlainStep
from snugfit.step.step import Outputs

if TYPE_CHECKING:
    import torch

    from snugfit.step.step import Observer


PREFILL, DECODE = "prefill", "decode"

LOOP_FUNCTIONS = 6
"""Host time of transformers' generation loop between two forward passes, in units of
`HostLaunchCosts.function`.

On a CPU, small models of six families spent 0.2 to 0.4 ms there in greedy decoding. That is the time of the
loop's kernels and 0.1 to 0.8 ms more, in the time of the H200's host. This is 0.42 ms.
"""

CACHE_ARGUMENTS = ("past_key_values", "cache_params")
"""Names of the cache among a model's arguments and outputs. Mamba has the second one."""


class StoppedEarly(Exception):
    """Internal exception that ends a simulation after the decode steps that it needs. Users never see it."""


class GenerateStep(PlainStep):
    """The loop over batches of prompts, in which each step is one call of `generate`."""

    decode_steps: int | None = None
    """Number of decode steps to simulate; None for all."""

    decoder_prompt: int = 1
    """Number of tokens with which the decoder of an encoder-decoder model begins."""

    prompt: int | None = None
    """Prompt tokens of the whole call, if only a part of it is simulated; None for the job's prompt."""

    recorder: ClassVar[Any] = None
    """Recorder of the current simulation; None without one."""

    def kind_of(self, operator: str, module: str, dtype: str) -> str:
        """Return the category of a memory block that a module allocates: activations. The loop labels logits,
        inputs and copies of the cache itself.
        """
        if module:
            return Kind.ACTIVATIONS
        # The last selection of beams copies a cache that no pass reads.
        if operator == "aten::index_select":
            return Kind.KEY_VALUES
        return Kind.LOGITS if "float" in dtype else Kind.INPUTS

    def _evaluate(self, steps: int, observer: Observer) -> list[float]:
        import torch
        from transformers import GenerationMixin

        if self.always_mask:
            raise UsageError("The phase generate is for the installed software only. Leave --software out.")
        observer.phase("build")
        model: Any = self.evaluated_model()
        inner = _generator_in(model)
        GenerationSettings.of(self.job, self.setup).prepare(inner)
        observer.build_ends(model, None)
        with contextlib.closing(self._batches()) as batches, _Follower(self, inner, observer) as follower:
            for index in range(steps):
                observer.step_begins(index)
                for piece in next(batches):
                    observer.phase("load")
                    batch = place(self._inputs(inner, piece), self.device)
                    observer.phase(PREFILL)
                    follower.passes = 0
                    with (
                        self._off_the_gpu(observer, index),
                        torch.no_grad(),
                        self.forward_context(),
                        contextlib.suppress(StoppedEarly),
                    ):
                        # Whisper's own `generate` calls `GenerationMixin.generate` for each part of a
                        # recording.
                        out = GenerationMixin.generate(
                            inner, **batch, generation_config=self.generation_config()
                        )
                        # Without this, the tokens would stay alive during the next call.
                        del out
                    del batch
                observer.step_ends(index)
        self.model = model
        return []

    @contextlib.contextmanager
    def _off_the_gpu(self, observer: Observer, call: int) -> Iterator[None]:
        """Context of call number `call` with substitutes for CUDA's streams and random draws, if the device
        lacks them.
        """
        import torch

        settings = GenerationSettings.of(self.job, self.setup)
        with contextlib.ExitStack() as stack:
            if settings.is_offloaded and self.device.type != "cuda":
                from snugfit.features.inference.offloaded import without_streams

                prompt = self.prompt or self.job.sequence_length if settings.cache == "offloaded" else 0
                stack.enter_context(without_streams(observer, self.recorder, call, prompt=prompt))
            if settings.sample and self.device.type == "meta":
                stack.enter_context(patch.object(torch, "multinomial", draw))
            yield

    def first_batch(self) -> dict[str, Any]:
        """Return the inputs of the first call of `generate`, on the device."""
        with contextlib.closing(self._batches()) as batches:
            return place(self._inputs(_generator_in(self.model), next(batches)[0]), self.device)

    def outputs(self) -> Outputs:
        """Return the logits of each new token and the generated ids, for the first batch of prompts."""
        import torch
        from transformers import GenerationMixin

        config = self.generation_config()
        config.output_logits = config.return_dict_in_generate = True
        config.do_sample = False  # random tokens would differ in every comparison
        with torch.no_grad(), self.forward_context():
            out: Any = GenerationMixin.generate(
                _generator_in(self.model), **self.first_batch(), generation_config=config
            )
        return Outputs(torch.stack(out.logits), out.sequences)

    def differences(self, own: Outputs, plain: Outputs) -> Mapping[str, Any]:
        """Return the differences of this step's logits and tokens from those of the plain model.

        Behind the first different token, two sequences have other inputs. So the largest error is that of the
        logits up to there. In a beam search, where rows of logits change places, it is that of all logits.
        """
        import torch

        results = dict(super().differences(own, plain))
        if results["ids_equal"] or own.ids.shape != plain.ids.shape:
            return results
        count = len(own.values)
        differ = (own.ids != plain.ids)[:, -count:].cumsum(1) > 0
        results["first_different_token"] = int(differ.any(0).int().argmax()) + 1
        if own.values.shape[1] == len(own.ids):
            has_other_inputs = torch.nn.functional.pad(differ[:, :-1], (1, 0)).T
            errors = (own.values - plain.values).abs().amax(-1)
            results["largest_error"] = float(errors[~has_other_inputs].max())
        if (dtype := self.setup.product_dtype(self.job)) != "float32":
            results["note"] = (
                f"{dtype} rounds logits, so the token with the largest one can change. Equal ids are "
                "expected in fp32 only."
            )
        return results

    def generation_config(self) -> Any:
        """Return the `GenerationConfig` of each call."""
        return GenerationSettings.of(self.job, self.setup).config()

    def _inputs(self, model: Any, piece: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of `generate` for a host batch, without labels. With `decoder_prompt`, they
        include decoder tokens.
        """
        import torch

        inputs = {name: value for name, value in piece.items() if name != "labels"}
        if self.decoder_prompt > 1:
            rows, start = len(next(iter(inputs.values()))), model.generation_config.decoder_start_token_id
            inputs["decoder_input_ids"] = torch.full((rows, self.decoder_prompt), start or 0, device="cpu")
        return inputs


def _generator_in(model: Any) -> Any:
    """Return the module that has the method `generate`, without the wrapper of adapters."""
    from transformers import GenerationMixin

    return next(module for module in model.modules() if isinstance(module, GenerationMixin))


class _Follower:
    """Forward hooks that mark the phases `prefill` and `decode` of a call of `generate`. They label the
    memory of cache and logits, and set the values of beam search.
    """

    def __init__(self, step: GenerateStep, model: Any, observer: Observer) -> None:
        self.step, self.model, self.observer = step, model, observer
        self.passes = 0
        """Number of forward passes in the current call of `generate`."""
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> _Follower:
        before = self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        after = self.model.register_forward_hook(self._end)
        self._undo.callback(before.remove)
        self._undo.callback(after.remove)
        self._undo.enter_context(_beams_stated(self.model, self.observer))
        return self

    def __exit__(self, *arguments: Any) -> None:
        self._undo.close()

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # After a pass, the selection of beams copies the cache.
        self._claim_cache(kwargs)
        if self.passes:
            self.observer.phase(DECODE)
            if (recorder := self.step.recorder) is not None:
                for _ in range(LOOP_FUNCTIONS):
                    recorder.count_function()
        if self.step.decode_steps is not None and self.passes > self.step.decode_steps:
            raise StoppedEarly
        self.passes += 1

    def _end(self, module: Any, args: tuple[Any, ...], outputs: Any) -> None:
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if logits is not None:
            self.observer.claim(logits, Kind.LOGITS)
        self._claim_cache(outputs)

    def _claim_cache(self, values: Any) -> None:
        for name in CACHE_ARGUMENTS if isinstance(values, Mapping) else ():
            for tensor in _tensors_of(values.get(name)):
                self.observer.claim(tensor, Kind.KEY_VALUES)


def _tensors_of(part: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a transformers cache, or of one of its layers."""
    import torch

    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, dict | list | tuple):
        for entry in part.values() if isinstance(part, dict) else part:
            yield from _tensors_of(entry)
    elif type(part).__module__.startswith("transformers."):
        # Other kinds of layers have their states in other attributes.
        yield from _tensors_of(vars(part))


@contextlib.contextmanager
def _beams_stated(model: Any, observer: Observer) -> Iterator[None]:
    """Context in which a simulation computes the values of a beam search that depend on the length alone.

    Without an end token, beams continue until the length is reached. Other values depend on scores, which are
    on `meta`.
    """
    import torch

    methods = {"_beam_search_has_unfinished_sequences", "_update_finished_beams"}
    if not all(hasattr(model, name) for name in methods):
        yield
        return
    goes_on, update = model._beam_search_has_unfinished_sequences, model._update_finished_beams
    operands_of_end, operands_of_update = inspect.signature(goes_on), inspect.signature(update)

    def state_end(*operands: Any, **named: Any) -> Any:
        values = operands_of_end.bind(*operands, **named).arguments
        # No sequence finishes before the maximum length, which another operand contains.
        for name, known in (("is_early_stop_heuristic_unsatisfied", True), ("is_sent_finished", False)):
            if name in values:
                observer.state(values[name], torch.full(values[name].shape, known, device="cpu"))
        return goes_on(*operands, **named)

    def state_indices(*operands: Any, **named: Any) -> Any:
        values = operands_of_update.bind(*operands, **named).arguments
        results = update(*operands, **named)
        indices = results[2]
        columns = values["cur_len"] + 1 - values["decoder_prompt_len"]
        value = torch.full(indices.shape, -1, dtype=indices.dtype, device="cpu")
        # Only the last update fills these indices, and no code reads the indices of earlier ones.
        value[..., :columns] = 0
        observer.state(indices, value)
        return results

    model._beam_search_has_unfinished_sequences, model._update_finished_beams = state_end, state_indices
    try:
        yield
    finally:
        del model._beam_search_has_unfinished_sequences, model._update_finished_beams


# ---- sampling ----------------------------------------------------------------------------------------------


def draw(probabilities: torch.Tensor, num_samples: int, *arguments: Any, **named: Any) -> torch.Tensor:
    """Return the result of `torch.multinomial` without replacement on `meta` tensors.

    On `meta`, the operator allocates its result alone. A device checks the probabilities, and divides them by
    random numbers in a tensor of their size. The source is `native/Distributions.cpp` (torch 2.13).
    """
    import torch

    rows = probabilities.shape[:-1]
    result = torch.empty((*rows, num_samples), dtype=torch.int64, device=probabilities.device)
    low, high = torch.aminmax(probabilities)
    torch._assert_async((low >= 0) & (high < float("inf")))
    torch._assert_async(~(probabilities.sum(-1) == 0).any())
    noise = torch.empty_like(probabilities).exponential_(1)
    torch.div(probabilities, noise, out=noise)
    if num_samples == 1:
        return torch.argmax(noise, -1, keepdim=True, out=result)
    values = torch.empty(result.shape, dtype=noise.dtype, device=noise.device)
    torch.topk(noise, num_samples, out=(values, result))
    return result
