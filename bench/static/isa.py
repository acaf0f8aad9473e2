"""Reading code: SASS, PTX and AMD's assembly, instructions by class and the widest access."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

# Per level of code, classes by opcode, the first match wins; what matches none is integer, address
# or move.
_CLASSES = {
    "sass": {
        "tensor": r"\w*MMA",
        "global": r"LDG(STS)?\b|STG|LD\b|ST\b|ATOMG?\b|REDG?\b|UBLKCP|UTMA",
        "shared": r"LDS|STS|ATOMS|LDTM|STTM",
        "local": r"LDL|STL",
        "barrier": r"BAR|(LDG)?DEPBAR|MEMBAR|WARPSYNC|SYNCS|FENCE",
        "shuffle": r"SHFL|REDUX|VOTE|MATCH",
        "special": r"MUFU",
        "convert": r"F2|I2F|FRND",
        "float": r"F(ADD|MUL|FMA|SET|SEL|MNMX|CHK)|H(ADD|MUL|FMA|SET|MNMX)2|D(ADD|MUL|FMA|SET)",
        "control": r"BRA|BRX|JMP|EXIT|RET|CALL|BSSY|BSYNC|BREAK|YIELD",
    },
    "ptx": {
        "tensor": r"mma|wgmma|tcgen05",
        "global": r"(ld|st|atom|red)\S*\.global|cp\.async\S*\.global",
        "shared": r"(ld|st|atom|red)\S*\.shared|ldmatrix|stmatrix",
        "local": r"(ld|st)\S*\.local",
        "barrier": r"bar|mbarrier|membar|fence|cp\.async",
        "shuffle": r"shfl|redux|vote|match",
        "special": r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div)\S*\.b?f\d",
        "convert": r"cvt",
        "float": r"\S*\.b?f\d\d",
        "control": r"bra|ret|exit|call",
    },
    "amdgcn": {
        "tensor": r"v_s?mfma",
        "global": r"global_|flat_|buffer_(load|store|atomic)",
        "shuffle": r"ds_b?permute|ds_swizzle|\w+_dpp|v_(read|write)(first)?lane|v_permlane",
        "shared": r"ds_",
        "local": r"scratch_",
        "barrier": r"s_barrier|s_waitcnt|buffer_",
        "special": r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_",
        "convert": r"v_cvt",
        "float": r"v_\w+_b?f\d\d|v_div_",
        "control": r"s_c?branch|s_endpgm|s_setpc|s_swappc",
    },
}
_INSTRUCTION = {
    "sass": re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;\n]*)", re.MULTILINE),
    "ptx": re.compile(r"^\s+(?:@!?%p\d+\s+)?([a-z][^;\n]*)", re.MULTILINE),
    "amdgcn": re.compile(r"^\t([a-z][^;\n]*)", re.MULTILINE),
}
_PTX_ACCESS = re.compile(r"(ld|st)\.(?=\S*\bglobal\b)(?:\S*\.v(\d))?\S*\.[bsuf](\d+)\s")
_PTX_COPY = re.compile(r"cp\.async\.c[ag]\S*\.global\S* [^,]*,[^,]*, *(\w+)")
_AMD_ACCESS = re.compile(
    r"(?:global|flat|buffer)_(load|store)_(?:lds_)?[us]?(byte|short|dword)(?:x(\d))?"
)
_AMD_BITS = {"byte": 8, "short": 16, "dword": 32}


def instructions(isa: str, code: str) -> list[str]:
    """Return the instructions of a kernel in order, without predicates; padding is left out."""
    if isa == "amdgcn":
        code = code.split("\t.section", 1)[0]  # What follows describes the kernel.
    return [
        line for line in _INSTRUCTION[isa].findall(code) if not line.startswith(("NOP", "s_nop"))
    ]


def instruction_mix(isa: str, lines: Sequence[str]) -> dict[str, int]:
    """Return how many instructions there are of each class that occurs."""
    patterns = {name: re.compile(pattern) for name, pattern in _CLASSES[isa].items()}
    return dict(
        Counter(
            next((n for n, p in patterns.items() if p.match(line)), "integer") for line in lines
        )
    )


def access_bits(lines: Sequence[str]) -> tuple[int, int]:
    """Return the bits of the widest load from and the widest store to global memory.

    They are those of one thread, in PTX or amdgcn.
    """
    bits = {"ld": [0], "st": [0]}
    for line in lines:
        if ptx := _PTX_ACCESS.match(line):
            bits[ptx[1]].append(int(ptx[2] or 1) * int(ptx[3]))
        elif copy := _PTX_COPY.match(line):
            bits["ld"].append(8 * int(copy[1], 0))
        elif amd := _AMD_ACCESS.match(line):
            bits["ld" if amd[1] == "load" else "st"].append(_AMD_BITS[amd[2]] * int(amd[3] or 1))
    return max(bits["ld"]), max(bits["st"])
