"""The name of a precision, as an option of the stages that take one."""

from __future__ import annotations

import click


class Precision(click.ParamType):
    """A quantized precision by its name, of the published quantizer or another scheme; or one of some other words."""

    name = "precision"

    def __init__(self, *words: str):
        self.words = words

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from kvstages.cache.schemes import precision

        if value not in self.words:
            try:
                precision(value)
            except ValueError as error:
                self.fail(str(error), param, ctx)
        return value
