"""Launch plans on a CPU: their kernels compiled as C++, with emulated threads and instructions.

``record()`` keeps the sources of kernels that are compiled while it is active; ``run_plan`` runs a
plan of such kernels on NumPy arrays. ``tests/emulator`` has the threads, CUDA's functions and the
PTX instructions.
"""

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from jax_tilekern.compilation import compiler
from jax_tilekern.compilation.headers import headers_of
from jax_tilekern.plans.launch import Buffer, Scalars, TensorMap

# A part of the names of programs.
SALT = ""
ROOT = Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "tests" / "emulator"
COMPILER = shutil.which("g++")
# Options of run_plan(). Threads leave their stacks by longjmp, which are not checked therefore.
SANITIZED = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "--param", "asan-stack=0",
)  # fmt: skip

# -- CUDA as C++ -----------------------------------------------------------------------------------

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def _closing(text, at):
    """The position behind the parenthesis that closes the one at ``at``."""
    depth = 0
    while True:
        if text[at] == '"':
            at = _STRING.match(text, at).end() - 1
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            return at


def _split(text, separator):
    """Split at a separator that is in no string and no parentheses."""
    parts, start, at = [], 0, 0
    while at < len(text):
        if text[at] == "(":
            at = _closing(text, at)
            continue
        if text[at] == '"':
            at = _STRING.match(text, at).end()
            continue
        if text[at] == separator:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [*parts, text[start:]]


def _instruction(statement):
    """Return what an ``asm`` statement has in its parentheses as a call of the emulator."""
    text, *sections = _split(re.sub(r"\\?\n", " ", statement), ":")
    operands = []
    for section in sections[:2]:
        for operand in filter(str.strip, _split(section, ",")):
            # A macro lists the accumulators of wgmma.
            expression = _STRING.sub("", operand)
            is_list = "TILEKERN_B_" in operand
            operands.append(
                "accumulators" if is_list else expression[expression.index("(") :].strip()
            )
    return f"emulation::Ptx<{text.strip()}>::run({', '.join(operands)})"


def as_cpp(text):
    """Return a CUDA text as C++ for the emulator."""
    result, at = "", 0
    for match in re.finditer(r"\basm\s*(?:volatile\s*)?\(", text):
        end = _closing(text, match.end() - 1)
        result += text[at : match.start()] + _instruction(text[match.end() : end - 1])
        at = end
    text = result + text[at:]

    def dynamic(match):
        indent, kind, name = match.groups()
        address = f"reinterpret_cast<{kind}*>(std::uintptr_t{{emulation::cta().base()}})"
        return (
            f"{indent}{kind}* const {name} = {address};"
            if indent
            else f"#define {name} ({address})"
        )

    text = re.sub(
        r"^( *)extern __shared__ (?:__align__\(\d+\) )?([\w: ]+?) (\w+)\[\];",
        dynamic,
        text,
        flags=re.M,
    )
    text = re.sub(r"__shared__( alignas\(\d+\))?", r"\1 static", text)
    # g++ does not take the address of a function with a pack of constants.
    text = re.sub(r"const __grid_constant__ (\w+)\.\.\.", r"\1...", text)
    # Headers are found by their whole names alone.
    text = re.sub(r'#( *)include "([^"]+)"', r"#\1include <\2>", text)
    return text.replace("__align__(", "alignas(").replace("__noinline__", "[[gnu::noinline]]")


# -- Plans -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def record():
    """Yield the requests of kernels that are compiled, by name and cubin."""
    found, compiled = {}, compiler._Request.compiled

    def recorded(self):
        result = compiled(self)
        for entry in result.entries:
            found[entry.name, entry.cubin] = self
        return result

    compiler._Request.compiled = recorded
    try:
        yield found
    finally:
        compiler._Request.compiled = compiled


def build(requests, *options):
    """Compile kernels of one text into a program that launches them; return its path."""
    source = requests[0].source
    texts = {**headers_of(source.text, source.headers).texts, "source.cuh": source.text}
    names = [request.name for request in requests]
    cases = "".join(
        f"    case {i}: return launch_with(&{name}, grid, block, cluster, shared, bytes);\n"
        for i, name in enumerate(names)
    )
    main = f"""#include "source.cuh"

int main(int, char** arguments) {{
  using emulation::Dim3, emulation::launch_with;
  return emulation::run_plan(arguments[1], [](int kernel, Dim3 grid, Dim3 block, Dim3 cluster,
                                              unsigned shared, const char* bytes) {{
    switch (kernel) {{
{cases}    }}
  }});
}}
"""
    arch = int(re.sub(r"\D", "", requests[0].arch)) * 10
    emulator = f'#define EMULATED_ARCH {arch}\n#include "main.h"\n'
    folder = _folder(emulator, main, sorted(texts.items()), options)
    program = folder / "program"
    if program.exists():
        return program
    for name, text in texts.items():
        path = folder / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_cpp(text))
    (folder / "main.cc").write_text(main)
    included = ["-include", _precompiled(emulator, options), f"-I{folder / 'include'}"]
    try:
        _compile(folder / "main.cc", program, *included, *options)
    except RuntimeError as error:
        raise RuntimeError(f"{names}: {error}") from None
    return program


def _folder(*content):
    """The folder of what is compiled of a content by the emulator as it is."""
    digest = hashlib.sha256(repr((SALT, *content)).encode())
    for path in (Path(__file__), *sorted(EMULATOR.iterdir())):
        digest.update(path.read_bytes())
    return Path(tempfile.gettempdir()) / "jax_tilekern_emulated" / digest.hexdigest()[:24]


def _precompiled(text, options):
    """Return a header of the emulator beside which g++ finds it compiled."""
    folder = _folder(text, options)
    header, compiled = folder / "emulator.h", folder / "emulator.h.gch"
    if not compiled.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"header{os.getpid()}"
        part.write_text(text)
        part.rename(header)
        _compile(header, compiled, "-x", "c++-header", *options)
    return header


def _compile(source, result, *options):
    part = result.with_name(f"part{os.getpid()}")
    command = [
        COMPILER, "-std=c++20", "-O1", "-w", "-no-pie", "-fno-strict-aliasing", f"-I{EMULATOR}",
        # Fortified functions end a program that jumps from one stack to another.
        "-U_FORTIFY_SOURCE", *options, source, "-o", part,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[:6000])
    # Another process may build the same.
    part.rename(result)


def run_plan(
    plan, recorded, operands, results, *, aliases=None, late=(), backwards=False, held=0,
    options=(), requests=(),
):  # fmt: skip
    """Run a launch plan on arrays; return its results, arrays of these shapes and types.

    ``aliases`` has operands whose buffers are those of results. ``late`` has "reads", or "writes",
    or both: asynchronous operations that take place when they are waited for (threads.h). ``held``
    is a seed of random choices of warps that wait while others go on.
    ``requests`` has further kernels of the same texts, which are in one program with the plan's.
    """
    poison = [np.full(size, 0xA5, np.uint8) for size in plan.workspace_bytes]
    # What a kernel does not write is NaN, or a large integer.
    outputs = [
        np.frombuffer(b"\xff" * (np.prod(shape, dtype=int) * np.dtype(dtype).itemsize), dtype)
        for shape, dtype in results
    ]
    operands = [*map(np.ascontiguousarray, operands)]
    for operand, result in (aliases or {}).items():
        outputs[result] = operands[operand]
    buffers = [*operands, *outputs, *poison]
    with tempfile.TemporaryDirectory() as folder:
        for i, buffer in enumerate(buffers):
            (Path(folder) / str(i)).write_bytes(buffer.tobytes())
        numbers = ["reads" in late, "writes" in late, backwards, held]
        numbers = [*map(int, numbers), folder, *_counted(b.nbytes for b in buffers)]
        own = [_request(recorded, launch) for launch in plan.launches]
        # Generated kernels of different texts have the same names, so each text is a program.
        of_texts = defaultdict(list)
        for request in dict.fromkeys((*requests, *own)):
            of_texts[request.source.text].append(request)
        pairs = zip(plan.launches, own, strict=True)
        for text, group in itertools.groupby(pairs, lambda pair: pair[1].source.text):
            path = Path(folder) / "plan"
            _run_launches(plan.name, list(group), of_texts[text], numbers, path, options)
        first = len(operands)
        return [
            np.frombuffer((Path(folder) / str(first + i)).read_bytes(), dtype).reshape(shape)
            for i, (shape, dtype) in enumerate(results)
        ]


def _run_launches(name, launches, requests, numbers, path, options):
    """Run launches of kernels of one text, given all that kernels of this text are compiled from.

    Each launch comes with what its own kernel is compiled from.
    """
    program = build(requests, *options)
    numbers = [*numbers, len(launches)]
    for launch, request in launches:
        numbers += [requests.index(request), *launch.grid, *launch.block, *launch.cluster]
        numbers += [launch.shared_memory_bytes, *_counted(launch.repeats)]
        numbers.append(len(launch.parameters))
        for parameter in launch.parameters:
            numbers += _numbers(parameter)
    path.write_text(" ".join(map(str, numbers)))
    done = subprocess.run([program, path], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-3000:]}")


def _request(recorded, launch):
    return recorded[launch.entry.name, launch.entry.cubin]


def _counted(values):
    values = list(values)
    return [len(values), *values]


def _numbers(parameter):
    """Return a parameter as main.h reads it."""
    if isinstance(parameter, Buffer):
        return [0, parameter.index, parameter.offset_bytes, *_counted(parameter.steps_bytes)]
    if isinstance(parameter, Scalars):
        return [1, *_counted(parameter.data)]
    assert isinstance(parameter, TensorMap)
    assert not parameter.interleave
    assert set(parameter.element_strides) <= {1}
    return [
        2, parameter.buffer, parameter.offset_bytes, *_counted(parameter.steps_bytes),
        parameter.element_bytes, parameter.swizzle, int(parameter.dtype == "tfloat32"),
        int(parameter.oob_fill == "nan"), *_counted(parameter.sizes),
        *_counted(parameter.strides_bytes), *_counted(parameter.box),
    ]  # fmt: skip
