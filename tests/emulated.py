"""CUDA kernels as C++ programs for the CPU, with emulated threads."""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests" / "emulation"
KERNELS = ROOT / "ffi" / "cuda"
COMPILER = shutil.which("g++")


def as_cpp(text):
    """What is not C++ takes the place of what CUDA calls it."""
    text = re.sub(r'#pragma once|#include "[^"]*"', "", text)
    text = text.replace("extern __shared__ float4 shared[];", "static float4 shared[1 << 14];")
    text = text.replace(
        "extern __shared__ uint4 shared_memory[];",
        "inline uint4* const shared_memory = reinterpret_cast<uint4*>(shared_bytes);\n"
        "inline uint32 shared_address(uint4*) { return 0; }",
    )
    text = re.sub(r"__shared__( alignas\(\d+\))?", r"\1 static", text)
    text = re.sub(r'asm\("ld\.[^"]*"[^;]*;', "bits = load<kBytes>(address);", text)
    stored = "std::memcpy(out, &vector, sizeof vector);"
    text = re.sub(r'asm volatile\("st\.[^;]*;"[^;]*;', stored, text)
    return _INSTRUCTION.sub(_as_function, text)


# An instruction of one result that tests/emulation/instructions.h has as a function.
_INSTRUCTION = re.compile(
    r'asm\("((?:div|max|min|rcp|ex2|cvt)[\w.]*) [^"]*"\s*:\s*"=\w"\(([\w.]+)\)\s*:\s*(.*?)\);'
)


def _as_function(found):
    name, result, operands = found.groups()
    read = re.findall(r'"\w"\((.*?)\)(?=, "|$)', operands)
    return f"{result} = ptx::{name.replace('.', '_')}({', '.join(read)});"


def build(program, files, folder, *options):
    """Compile a program of tests/emulation over these files of kernels, or headers of emulation."""
    parts = [
        f'#include "{name}"\n' if name.endswith(".h") else as_cpp((KERNELS / name).read_text())
        for name in files
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.h").write_text("#pragma once\n" + "".join(parts))
    command = [COMPILER, "-std=c++20", "-O1", "-w", f"-I{folder}", f"-I{EMULATION}", *options]
    # Fortified functions end a program that jumps from one stack to another.
    command.append("-U_FORTIFY_SOURCE")
    source = EMULATION / f"{program}.cc"
    subprocess.run([*command, source, "-o", folder / program], check=True)
    return folder / program


def output_of(program, *arguments):
    """The number that a program prints."""
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return float(done.stdout)
