"""Hugging Face's Trainer: a callback that compresses the model when training begins, DDP or FSDP2."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import transformers

import tagc.torch as tagc
from tagc.integrations import _common


class TagcCallback(transformers.TrainerCallback):  # type: ignore[misc]  # transformers may not be there, and is not looked into
    """trainer.add_callback(TagcCallback(trainer)), with the options of tagc.compress(). `handle` exists
    during training.

    Each checkpoint gets a folder `tagc` with residuals and the schedule. A resumed run restores them from
    resume_from if that is given, else from the checkpoint that trainer.train() was called with. The Trainer
    logs statistics as tagc/<name>."""

    def __init__(
        self, trainer: transformers.Trainer, *, resume_from: str | pathlib.Path | None = None, **options: Any
    ) -> None:
        self._trainer, self._resume_from, self._options = trainer, resume_from, options
        self.handle: tagc.Compressed | None = None
        self._resumed: str | pathlib.Path | bool | None = None  # what train() got
        train = trainer.train

        @functools.wraps(train)
        def observed(resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
            self._resumed = resume_from_checkpoint
            return train(resume_from_checkpoint, *arguments, **named)

        trainer.train = observed  # callbacks are not told the path

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        _common.check_started("start this script with torchrun or accelerate launch")
        model = self._trainer.model_wrapped
        if self.handle is None or self.handle.is_closed or not self.handle.is_of(model):
            self.handle = tagc.compress(model, kwargs["optimizer"], **self._options)
        if (scaler := getattr(self._trainer.accelerator, "scaler", None)) is not None:
            self.handle.follow(scaler)
        if state.global_step:
            given = self._resume_from or self._resumed
            if given is True:
                given = transformers.trainer_utils.get_last_checkpoint(args.output_dir)
            _common.load(self.handle, given or None)

    def on_step_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        if control.should_log and self.handle is not None:
            self._trainer.log(_common.logged(self.handle))
            control.should_log = True  # log() says that all is logged, and the loss is not yet

    on_epoch_end = on_step_end  # logging_strategy="epoch" asks for it there

    def on_save(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        name = f"{transformers.trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        assert self.handle is not None  # since on_train_begin()
        _common.save(self.handle, pathlib.Path(args.output_dir) / name)
