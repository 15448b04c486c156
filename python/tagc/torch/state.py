"""Residuals in checkpoints: what is not sent yet must survive, or a resumed run loses it."""


def save(handle):
    raise NotImplementedError


def load(handle, saved):
    raise NotImplementedError


class Reader:
    def __init__(self, handle, checkpoint_id):
        raise NotImplementedError
