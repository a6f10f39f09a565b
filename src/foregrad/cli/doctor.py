"""Whether Foregrad can work here: versions, compilers, devices, and the private names of torch that it stands on."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from .._torch import missing_names, private_names
from ..abstract.tensor_meta import table_file, torch_version
from .output import doing
from .parts import Part, Table, Verdict

OLDEST, NEWEST = (2, 11), (2, 15)  # torch that was tried


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was looked at, whether Foregrad can work with it, and what it means if it could be better."""

    name: str
    found: str
    fine: bool = True
    note: str = ""


def diagnose() -> tuple[int, list[Part]]:
    """The exit code, 1 where Foregrad cannot work, and the report."""
    with doing("looking at torch"):
        findings = [_torch(), _private_names(), _layouts(), _compiler(), _triton(), _cuda(), _rich()]
    head = [Finding("foregrad", version_of("foregrad") or "not installed, run from its source")]
    head += [Finding("Python", f"{platform.python_version()}, {platform.machine()}, {platform.system()}")]
    rows = [(one.name, one.found, one.note) for one in (*head, *findings)]
    wrong = [one.name for one in findings if not one.fine]
    verdict = f"Foregrad cannot work here: {', '.join(wrong)}." if wrong else "Foregrad can work here."
    return int(bool(wrong)), [Table("what was found", ("", "", ""), tuple(rows)), Verdict(verdict, not wrong)]


def version_of(package: str) -> str | None:
    """The version of a package, if it is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> Finding:
    known = OLDEST <= tuple(map(int, torch.__version__.split(".")[:2])) <= NEWEST
    tried = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    return Finding("torch", torch.__version__, note="" if known else f"it was tried with {tried} only")


def _private_names() -> Finding:
    missing = missing_names()
    found = f"{len(private_names()) - len(missing)} of {len(private_names())} are there"
    return Finding("private names of torch", found, not missing, f"missing: {', '.join(missing)}" if missing else "")


def _layouts() -> Finding:
    there = table_file(torch_version(), "cpu").exists()
    note = "" if there else f"none for torch {torch_version()}: the first capture of a process takes longer"
    return Finding("layout table", "there" if there else "not there", note=note)


def _compiler() -> Finding:
    """What Inductor calls for the CPU; Foregrad itself compiles nothing."""
    name = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if name is None or shutil.which(name) is None:
        return Finding(
            "C++ compiler", "none", note="Inductor needs one for the CPU: install g++ or clang++, or set CXX"
        )
    said = subprocess.run([name, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    return Finding("C++ compiler", (said.splitlines() or [name])[0])


def _triton() -> Finding:
    there = importlib.util.find_spec("triton") is not None
    needed = torch.cuda.is_available() and not there
    return Finding("Triton", version_of("triton") or "there" if there else "none", note=_TRITON if needed else "")


_TRITON = "Inductor needs it for the GPU: install triton"


def _cuda() -> Finding:
    if torch.version.cuda is None:
        return Finding("CUDA", "none, this torch is built without it")
    if not torch.cuda.is_available():
        return Finding("CUDA", f"{torch.version.cuda}, no device")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("CUDA", f"{torch.version.cuda}, {', '.join(names)}")


def _rich() -> Finding:
    return Finding(
        "rich", version_of("rich") or "none", note="" if version_of("rich") else "reports come as plain text"
    )
