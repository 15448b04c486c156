"""tagc.pipeline: what the stages of a pipeline send each other, in few bits.

stage      compress_stage() and its handle
advice     advise_stage(), which measures messages and says whether that pays
blocks     a tensor as one message"""

from tagc.pipeline.advice import advise_stage
from tagc.pipeline.stage import CompressedStage, compress_stage

__all__ = ["CompressedStage", "advise_stage", "compress_stage"]
