"""What goes wrong on the text side: a model folder that cannot be read, a template, a request.

Told apart by who can act: whoever starts the server (`TokenizerError`, `TemplateError`) or the client that
sent the request (`FrontendError`).
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["EncodingError", "FrontendError", "PromptTooLongError", "TemplateError", "TokenizerError"]


class TokenizerError(Exception):
    """A tokenizer file that is missing, damaged or of a kind that is not served.

    file: the file. what: what is wrong with it.
    """

    def __init__(self, file: Path, what: str) -> None:
        super().__init__(f"{file}: {what}")
        self.file = file
        self.what = what


class TemplateError(Exception):
    """A chat template that cannot be used: refused when it is compiled, or stopped while it renders.

    refusal: True where the template itself said no (`raise_exception`), which a client can mend.
    """

    def __init__(self, what: str, *, refusal: bool = False) -> None:
        super().__init__(what)
        self.refusal = refusal


class FrontendError(Exception):
    """A request that cannot be rendered. The client can fix it.

    param: path of the field (`messages[2].content`). message: what is wrong, with the value and the bound.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message


class PromptTooLongError(FrontendError):
    """A prompt that no context holds, found before all of it was encoded.

    bound: tokens that it has more of.
    """

    def __init__(self, param: str, bound: int) -> None:
        super().__init__(param, f"has more than {bound} tokens")
        self.bound = bound


class EncodingError(Exception):
    """A text that the tokenizer library gives up on."""
