"""What tagc says to users: by the logger "tagc", at INFO. Where a program has set up logging, that gets it;
else it is on the terminal, as it stands."""

from __future__ import annotations

import logging


class _Terminal(logging.Handler):
    """Prints what no handler of the program gets."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(record.getMessage(), flush=True)


_logger = logging.getLogger("tagc")
if not _logger.handlers:  # else the program has routed it already
    _logger.addHandler(_Terminal())
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.INFO)


def say(text: str) -> None:
    """Says it, on this rank."""
    _logger.info("%s", text)
