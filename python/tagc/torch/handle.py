"""Compressed, the handle that compress() returns: what users call."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from tagc._library import Error
from tagc.torch import checkpoint
from tagc.torch.exchange import internals
from tagc.torch.exchange.interfaces import Wrapped
from tagc.torch.exchange.runner import Runners
from tagc.torch.exchange.staging import Staging
from tagc.torch.log import Log
from tagc.torch.memory import Held, Memory, count
from tagc.torch.passes import Passes
from tagc.torch.schedule.options import Settings
from tagc.torch.state import State
from tagc.torch.statistics import beside_dense


class Compressed:
    """One model whose gradients tagc exchanges. compress() makes it.

    stats(), table(), n_steps    what was sent; what is compressed; exchanges so far
    memory()                     what tagc holds
    record(path)                 a line per step for tagc-report
    watch(loss)                  guards the run
    adapt(optimizer), param_groups(), follow(scaler)
                                 for an optimizer or a scaler that is made after compress()
    save(folder), load(folder), state_dict(), load_state_dict(), at(path)
                                 residuals in checkpoints
    close(), on_close(call)      ends it, as `with` does; what else is to be done then"""

    def __init__(
        self,
        model: torch.nn.Module,
        wrapper: Wrapped,
        options: Settings,
        table: str,
        staging: Staging | None = None,
        is_fresh: bool = False,
    ) -> None:
        self.model, self.wrapper, self._table, self._process = model, wrapper, table, os.getpid()
        self.state = State(model, wrapper, options, is_fresh)
        self._log: Log | None = None
        self.passes = Passes(self.state, Runners(staging, options.codec_on()))

    @property
    def is_closed(self) -> bool:
        return self.state.is_closed

    def is_of(self, model: torch.nn.Module) -> bool:
        """Returns whether this is the model whose gradients it exchanges, also within torch.compile()."""
        return internals.unwrapped(model) is self.model

    def on_close(self, call: Callable[[], object]) -> None:
        """Calls that when the handle is closed: for what others' libraries have registered. Local."""
        self.passes.undo.append(call)

    @property
    def n_steps(self) -> int:
        """Exchanges of the whole model so far."""
        return self.state.n_steps

    @property
    def codec(self) -> str:
        """The place of selection and encoding: "host", or "device" with kernels."""
        return "host" if self.passes.runners.kernels is None else "device"

    def memory(self) -> Memory:
        """Returns what tagc holds on this rank, in bytes, as it is allocated: `host` and `device`, each with
        residual, replicas, buffers, pinned, and what is transient. Printed, it is a table. Of tensors in CPU
        memory it is made at the first exchange. Local."""
        if self.is_closed:
            return Memory(Held(), Held())
        return count(self.passes.comms(), self.wrapper.replica_tensors(), self.passes.runners)

    def stats(self) -> dict[str, Any]:
        """Returns statistics of this rank's last backward pass that exchanged gradients: a new dict of
        numbers, and of dicts of numbers. {} before the first. Thread-safe.

        step                 exchanges so far: backward passes that exchanged gradients
        loss_scale           factor by which these gradients were multiplied
        world_size           ranks that exchanged gradients
        n_units              exchanges in this step: modules under FSDP, buckets under DDP
        n_elems              elements of the gradients, with torch's padding
        n_compressed         of these, in the class "compressed"
        n_gentle             of n_elems, those in the gentle start: see "The beginning" in
                             docs/guide/pytorch.md
        sparsity             share of the compressed that this rank did not send
        bytes_sent           by this rank in total, to other hosts: gradients, parameters, and the messages
                             before each exchange by which ranks agree on it
        bytes_received       likewise
        ranks_per_host       whose gradients are added up within a host before tagc exchanges the sums; 1:
                             each rank's are exchanged as they are
        bytes_within         that this rank sent to others of its host for that, and so that all of them get
                             what each gathered of the parameters; not in the other numbers
        bytes_by_leg         bytes_sent by kind: index, values, leftover, result (the second half of an
                             all-reduce), gather (parameters), control
        bits_per_param       sent by a host per element of the gradients, before the factor (H-1)/H that any
                             exchange between H hosts has. With ranks_per_host, a rank sends that share of it
        mean_bits_per_param  the mean of bits_per_param over all exchanges of this handle
        dense_bytes          bytes that this rank would send to other hosts in a dense exchange of the same
                             gradients in their own dtype: (H-1)/H of what it exchanges, all-reduces twice
                             that
        ratio                dense_bytes / bytes_sent for the gradients
        exchange_s           in exchanges of gradients, including waiting for peers
        agree_s              waiting until all ranks had reached an exchange; 0 under DDP and FSDP2 with one
                             rank per host, where exchange_s has it
        gather_s             in gathers of parameters
        time_s               by phase, summed over exchanges even if they overlap: select, index, encode,
                             decode, wait
        n_gathered           elements of gathered parameters
        gather_bits          sent by a host per element of the parameters, before (H-1)/H
        n_saturated          values of fp16 gradients that compression put beyond 65,504: the rest waits in
                             the residual
        n_nonfinite          units whose gradients were not finite on some rank; nonfinite_units: {name: 1}
                             of each"""
        return self.passes.recorder.last

    def record(self, path: Any) -> None:
        """Writes a line of JSON to that file after each step, on rank 0, for `tagc-report`: stats(), the
        seconds since the last step, the level of each group of parameters, and the loss if watch() gets it. A
        resumed run continues its file. A file that cannot be written later ends the record with a warning.
        Local."""
        self._check_open("record()")
        self._log = Log(path, self.state, self.passes.groups)
        self.passes.frees.append(self._log.close)
        self.passes.recorded = self._log.step

    def table(self) -> str:
        """Returns the table of compressed and other parameters, as printed at the start."""
        return self._table

    def _check_open(self, call: str) -> None:
        if self.is_closed:
            raise Error("state", f"{call}: this tagc handle is closed")

    def follow(self, scaler: Any) -> None:
        """Scales residuals with the loss scale of a torch.amp.GradScaler from now on.

        If the scaler skips a step because a gradient is not finite, the residuals of that gradient's module
        are unchanged. Values that other modules have sent in that step are lost."""
        self._check_open("follow()")
        if not callable(getattr(scaler, "get_scale", None)):
            raise Error("argument", f"scaler is a {type(scaler).__name__}, must have get_scale()")
        self.passes.scaler = scaler

    def loss_scale(self, scale: float) -> None:
        """Sets the loss scale of the next gradients, for loops without a scaler. Local; pass the same on all
        ranks."""
        self._check_open("loss_scale()")
        self.state.set_loss_scale(scale)
        self.state.knows_scale = True

    def synchronize(self) -> None:
        """Waits until all exchanges of device tensors are complete, and raises the first failure.
        backward() does so at its end. Call it after a forward pass without backward if `parameters` are
        deltas. Local."""
        self.passes.synchronize()

    def discard(self) -> None:
        """Forgets the residuals. Call it on every rank if you throw the gradients of a backward pass away,
        as those of a batch whose norm is a spike: what they left in the residuals would come with later
        gradients. What earlier gradients left is lost, too. Gradients with inf or NaN leave nothing.

        If gradients are thrown away in every step, do not call it. Freeze parameters that get no step
        (requires_grad_(False)), or exchange nothing (no_sync(), set_requires_gradient_sync(False)). Local."""
        self._check_open("discard()")
        self.synchronize()
        self.state.discard()
        self.state.moments.has_discarded()

    def reset_parameters(self) -> None:
        """Makes the next gather send whole values, in bf16, if `parameters` are deltas. Call it after a
        change of parameters outside of an optimizer's step (the model's load_state_dict() calls it itself): a
        delta rounds a large change to a few bits. Local; one rank is enough."""
        self._check_open("reset_parameters()")
        self.wrapper.reset_parameters()

    def adapt(self, optimizer: Any) -> None:
        """Gives tagc the optimizer: one of torch's, a trainer's wrapper around one, or a list if several
        share the model. Local; call it on every rank, between steps. compress(model, optimizer) calls it.

        For an Adam (Adam, AdamW, NAdam, RAdam, their fused and 8-bit forms), tagc lowers beta1 of a
        compressed parameter to 0.5, step by step, once its gradient is mostly noise; then selection begins.
        Where values are selected, tagc raises beta2. Both happen inside step(): groups, state, learning rates
        and weight decay are unchanged, and checkpoints are those of a run without tagc. Other optimizers are
        not changed: if one has no first moment, tagc selects values; if it may have one, all values are sent
        in 4 bits. Rank 0 prints which. What changes later in groups and requires_grad is followed."""
        self._check_open("adapt()")
        self.state.moments.adapt(optimizer)
        self.state.say(f"tagc: {self.state.moments.words}")

    def watch(self, loss: float | torch.Tensor) -> None:
        """Hands over the loss of a batch, on each rank, once per backward pass: `handle.watch(loss)`. Where
        its mean over 20 exchanges and all ranks has risen by 2 % and by 4 standard errors, twice in a row,
        rank 0 warns, and every value travels until gradients are noise again, each time for twice as long.
        Local."""
        self._check_open("watch()")
        if self.wrapper.deciders() is None:
            raise Error(
                "unsupported",
                "ranks of this model exchange different parameters, no mesh has all of them, and they could "
                "decide differently from the loss: do not call watch()",
            )
        self.state.schedule.watch_loss(loss)
        if self._log is not None:
            self._log.see(loss)

    def param_groups(
        self,
        betas: tuple[float, float] | None = None,
        groups: Iterable[dict[str, Any]] | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Returns parameter groups for an Adam that is made after compress(): compressed parameters have a
        beta1 of 0.5, others have `betas` or the optimizer's default.

        groups: your own groups, as optimizers take them ({"params": ..., "weight_decay": ...}); each is split
        in two and keeps its options. Default: all trainable parameters. An optimizer that is not an Adam gets
        its own betas back at its first step, and rank 0 prints that."""
        self._check_open("param_groups()")
        return self.state.moments.param_groups(betas, groups, options)

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's residuals, for torch.save() or torch.distributed.checkpoint. Each rank has
        its own. Local; call it between backward passes."""
        self.synchronize()
        return checkpoint.save(self.state)

    def load_state_dict(self, saved: Any) -> None:
        """Loads what state_dict() returned. Local. saved: the state_dict() of this rank; if another number of
        ranks saved, a list of those of all ranks. If it does not fit, it raises Error and changes nothing.
        Residuals are scaled to the next loss scale."""
        self.synchronize()
        checkpoint.load(self.state, saved)

    def save(self, folder: Any) -> None:
        """Writes state_dict() to a file of this rank in that folder, and makes the folder if it is missing.
        Local; call it on every rank, between steps, with the same folder. Each handle, as of each model and
        of each stage of a pipeline, has a folder of its own."""
        self.synchronize()
        checkpoint.save_files(self.state, folder)

    def load(self, folder: Any) -> None:
        """Loads what save() wrote, also with another number of ranks. Local. If it does not fit, it raises
        Error and changes nothing."""
        self.synchronize()
        checkpoint.load(self.state, checkpoint.read_files(self.state, folder))

    def at(self, checkpoint_id: Any, key: str | None = None, storage_reader: Any = None) -> checkpoint.Reader:
        """Replaces the handle in a dcp.load() of a checkpoint that another number of ranks saved:

            dcp.load({"model": ..., "tagc": handle.at(path)}, checkpoint_id=path)

        key: the handle's key, if the checkpoint has several. Local; dcp.load() is collective."""
        return checkpoint.Reader(self.state, checkpoint_id, key, storage_reader)

    def close(self) -> None:
        """Removes the hooks if torch allows it, and frees the residuals. Local; call it on every rank, since
        gradients are torch's to exchange from then on."""
        self.passes.close()

    def __del__(self) -> None:
        """Runs when the model, and so its hooks, are gone. Python would not free libtagc's memory and
        threads. A forked process has copies of these objects but not the threads."""
        passes = vars(self).get("passes")  # not there if it could not be made
        if (
            passes is not None
            and not self.is_closed
            and self._process == os.getpid()
            and not sys.is_finalizing()
        ):
            passes.free()

    def __repr__(self) -> str:
        """Returns a line on what is exchanged. Local, from any thread, at any time."""
        model = type(self.model).__name__
        if self.is_closed:
            return f"<tagc handle of a {model}, closed; exchanges: {self.n_steps}>"
        now = str(self.state.schedule) or f"compressed: {self.state.options.travels('compressed')}"
        last = self.passes.recorder.last
        sent = (
            f", the last one of {last['bits_per_param']:.3g} bits per element ({beside_dense(last)})"
            if last
            else ""
        )
        return (
            f"<tagc handle of a {model} ({self.wrapper.name}, {self.wrapper.n_ranks()} ranks): "
            f"{self._table.splitlines()[-1]}; {now}; exchanges so far: {self.n_steps}{sent}>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets a model that has its handle as an attribute be saved or copied."""
        warnings.warn(
            "tagc: a copied or pickled handle exchanges nothing and has no residuals: save "
            "handle.state_dict(), and call compress() on the copied model",
            stacklevel=2,
        )
        return Copied, ()

    def __dir__(self) -> list[str]:
        """Returns what users call, for completion: not what tagc's own modules share."""
        return [name for name in super().__dir__() if name not in ("state", "passes", "wrapper")]

    def __enter__(self) -> Compressed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Copied:
    """Replaces the handle in a copy of its model."""

    is_closed = True

    def close(self) -> None:
        """Does nothing."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy and pickle look for optional methods
            raise AttributeError(name)
        raise Error(
            "state", f"{name}: this copy of a tagc handle exchanges nothing: call compress() on this model"
        )
