"""Imports point down the floors of DESIGN.md, and libraries are named only where they belong."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "mtp_train"
NAME = "mtp_train"

FLOORS = {
    "core": 0,
    "text": 1,
    "store": 1,
    "losses": 1,
    "attention": 1,
    "page": 1,
    "serving_plugin": 1,
    "models": 2,
    "heads": 2,
    "batches": 2,
    "engine": 3,
    "checkpoint": 3,
    "dialogue": 3,
    "precompute": 4,
    "regenerate": 4,
    "train": 4,
    "evaluate": 4,
    "export": 4,
    "report": 4,
    "inspection": 4,
    "cli": 5,
}
NEIGHBOURS = {
    ("heads", "models"),  # a head is built from the target's own block class
    ("heads", "batches"),  # a rollout is aligned where every shift is
    ("dialogue", "engine"),  # a conversation asks with the engine's requests
}

# Library -> the only places (packages or files) that may import it.
LIBRARIES = {
    "accelerate": ("train", "core/dist.py", "cli/train.py", "models/reference.py"),
    "deepspeed": ("train", "core/dist.py", "cli/train.py"),
    "hydra": ("cli",),
    "omegaconf": ("cli",),
    "yaml": ("cli",),
    "transformers": (
        "serving_plugin",
        "attention",
        "text",
        "models",
        "dialogue",
        "regenerate",
        "evaluate",
        "cli",
    ),
    "flashinfer": ("attention",),
    "torchao": ("models",),
    "torch": (
        "core/dist.py",
        "store",
        "losses",
        "attention",
        "models",
        "heads",
        "batches",
        "engine",
        "checkpoint",
        "precompute",
        "train",
        "evaluate",
        "export",
        "serving_plugin",
        "cli",
    ),
    "fsspec": ("store/places.py",),
    "zstandard": ("store/codecs.py",),
    "gguf": ("models",),
    "jinja2": ("page", "text"),
    "rich": ("inspection", "cli"),
    "datasets": ("text",),
    "pyarrow": ("text",),
    "tokenizers": ("text",),
    "httpx": ("regenerate",),
    "wandb": (),
    "tensorboard": (),
    "vllm": ("precompute/vllm_side/mtp_train_vllm_states.py", "serving_plugin"),
    "pickle": (),
}


@dataclass(frozen=True)
class Import:
    """One imported module, as a file of the package names it."""

    file: str  # posix path below the package's root
    module: str

    @property
    def package(self) -> str:
        """The package whose file this is; empty for the root's own files."""
        return self.file.split("/")[0] if "/" in self.file else ""

    @property
    def target(self) -> str:
        """The package that is imported; empty for the root's own names."""
        parts = self.module.split(".")
        return parts[1] if len(parts) > 1 else ""

    @property
    def ours(self) -> bool:
        return self.module.split(".")[0] == NAME


def read_imports(root: Path) -> list[Import]:
    """Every import below `root`, those inside functions and TYPE_CHECKING blocks too."""
    found = []
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found += [Import(file, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: imports name their package in full"
                found += [Import(file, module) for module in _modules(root, node)]
    return found


def _modules(root: Path, node: ast.ImportFrom) -> list[str]:
    """`from package import module` names a module; `from module import name` names the one it comes from."""
    base = node.module or ""
    inside = root.joinpath(*base.split(".")[1:])
    names = [alias.name for alias in node.names]
    modules = [
        name for name in names if (inside / f"{name}.py").is_file() or (inside / name).is_dir()
    ]
    if base.split(".")[0] != NAME or not modules:
        return [base]
    return [f"{base}.{name}" for name in modules] + ([base] if len(modules) < len(names) else [])


def wrong_floors(imports: list[Import]) -> list[str]:
    """Imports that point up, or sideways without leave."""
    wrong = []
    for item in imports:
        if not item.ours or item.package == item.target or not item.target:
            continue
        here = FLOORS.get(item.package, -1)  # the root's own files stand below all floors
        there = FLOORS.get(item.target, 99)
        if there > here or (there == here and (item.package, item.target) not in NEIGHBOURS):
            wrong.append(f"{item.file} (floor {here}) imports {item.module} (floor {there})")
    return wrong


def wrong_libraries(imports: list[Import]) -> list[str]:
    """Imports of a library from a place that must not know it."""
    wrong = []
    for item in imports:
        places = LIBRARIES.get(item.module.split(".")[0])
        if places is not None and item.package not in places and item.file not in places:
            wrong.append(f"{item.file} imports {item.module}")
    return wrong


def find_cycle(imports: list[Import]) -> list[str]:
    """Modules that import each other in a ring; empty if there is none."""
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for item in imports:
        module = (
            f"{NAME}.{item.file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
        )
        if item.ours and item.module != NAME:
            graph[module].add(item.module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return read_imports(ROOT)


def test_every_package_has_a_floor_and_a_docstring_and_all_files_were_read(
    imports: list[Import],
) -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(FLOORS)
    folders = {path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("*/*.py")}
    assert folders == packages, "a folder with code is a package"
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")}
    assert len(files) >= 89
    assert {item.file for item in imports} >= {
        name for name in files if not name.endswith("__init__.py")
    }
    assert len([item for item in imports if item.ours]) >= 209
    for name in files:
        assert ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))), name


def test_imports_point_down(imports: list[Import]) -> None:
    assert wrong_floors(imports) == []


def test_evaluate_measures_without_training_code(imports: list[Import]) -> None:
    assert [item for item in imports if item.package == "evaluate" and item.target == "train"] == []


def test_no_module_imports_itself_in_a_ring(imports: list[Import]) -> None:
    assert find_cycle(imports) == []


def test_libraries_are_named_only_where_they_belong(imports: list[Import]) -> None:
    assert wrong_libraries(imports) == []
    used = {item.module.split(".")[0] for item in imports}
    assert {"accelerate", "hydra", "omegaconf", "transformers", "torch"} <= used


def test_nothing_is_imported_by_name_except_a_stage_by_the_command_line() -> None:
    named = [
        f"{path.relative_to(ROOT).as_posix()}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("importlib.import_module", "__import__", "import_module")
    ]
    assert named == ["cli/main.py"]


def test_only_safetensors_are_read_and_written() -> None:
    calls = [
        f"{path.relative_to(ROOT).as_posix()}: {ast.unparse(node.func)}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    assert [
        call for call in calls if call.endswith((": torch.load", ": torch.save", ": np.load"))
    ] == []
    assert any(call.endswith(": save_tensors") for call in calls)


@pytest.mark.parametrize(
    ("file", "line", "checker"),
    [
        ("core/bad.py", "from mtp_train.store.shards import FeatureStore", wrong_floors),
        ("engine/bad.py", "import mtp_train.train.loop", wrong_floors),
        ("evaluate/bad.py", "from mtp_train.train import loop", wrong_floors),
        ("models/bad.py", "from mtp_train.heads.mtp import MtpHead", wrong_floors),
        ("text/bad.py", "from mtp_train.store import shards", wrong_floors),
        ("heads/bad.py", "from mtp_train.nowhere import thing", wrong_floors),
        ("bad.py", "from mtp_train.core.errors import UserError", wrong_floors),
        ("engine/bad.py", "def late():\n    from accelerate import Accelerator", wrong_libraries),
        ("cli/evaluate.py", "import accelerate", wrong_libraries),
        ("train/bad.py", "from omegaconf import DictConfig", wrong_libraries),
        ("store/bad.py", "import transformers.utils", wrong_libraries),
    ],
)
def test_the_check_sees_a_wrong_import(
    file: str, line: str, checker: object, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line + "\n")
    assert len(checker(read_imports(tmp_path))) == 1  # type: ignore[operator]


def test_the_check_sees_a_ring(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "one.py").write_text("from mtp_train.core import two\n")
    (tmp_path / "core" / "two.py").write_text("def late():\n    import mtp_train.core.one\n")
    assert find_cycle(read_imports(tmp_path))
