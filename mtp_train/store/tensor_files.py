"""Write tensors to a safetensors file so that a full disk is an `OSError`, as it is for any other file.

Knows no format beyond safetensors' own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.core.owned import usual_mode


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions that the umask asks for.

    Raises:
        OSError: the system refused, such as a full disk.
        UserError: the library refused for another reason.
    """
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise UserError(
            "tensors must be written whole", f"{path}: {error}", "try again, or name another folder"
        ) from error
    usual_mode(path)
