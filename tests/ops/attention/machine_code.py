"""What a launch's disassembly says of its loop."""

import re

from tjk.executors.compiler import Binary


def hot_loop(binary: Binary) -> list[str]:
    """The instructions of the innermost loop that has tensor-core instructions; empty if none."""
    labels, code, loops = {}, [], []
    for line in binary.disassembly.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(code)
        else:
            code.append(line)
    for end, line in enumerate(code):
        branch = re.search(r"\bBRA\b.*?(\.L\w+)", line)
        if branch and labels.get(branch[1], end) < end:
            body = code[labels[branch[1]] : end]
            if any("MMA" in line for line in body):
                loops.append(body)
    return min(loops, key=len, default=[])
