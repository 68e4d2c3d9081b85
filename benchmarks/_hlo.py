"""Read compiled programs: a TPU's cycles, the bytes that GPU kernels move, collectives.

XLA prints a program as computations, which are lists of instructions. What runs are the entry, the
bodies of loops, branches of conditionals, and the targets of calls. Loops count by their trip
counts, or once if these are unknown, and conditionals by their dearest branch.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ENTRY = "ENTRY"
SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4}
SIZES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}
# They move no bytes, or their bytes are counted where the copy ends.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "copy-start"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_ARRAY = re.compile(rf"\b({'|'.join(SIZES)})\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One instruction as printed. `literal` is the text in parentheses: operands or a value."""

    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    def named(self, attribute: str) -> str | None:
        """Return the computation that an attribute names, if there is one."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found and found[1]

    @property
    def op_name(self) -> str:
        """Return the JAX operation that it stems from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def cycles(self) -> int:
        """Return the compiler's price, or 0 where it has none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else 0

    @property
    def value(self) -> int | None:
        """Return the integer that a constant holds, or None if it is something else."""
        is_integer = self.operation == "constant" and re.fullmatch(r"-?\d+", self.literal)
        return int(self.literal) if is_integer else None

    @property
    def branches(self) -> list[str]:
        """Return the computations of which a conditional runs one."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if found:
            return [name.strip().lstrip("%") for name in found[1].split(",")]
        names = [self.named(f"{truth}_computation") for truth in ("false", "true")]
        return [name for name in names if name]


Program = dict[str, list[Instruction]]


def parse(text: str) -> Program:
    """Return the instructions of every computation; the entry is called `ENTRY`."""
    program: Program = {}
    current: list[Instruction] | None = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = program.setdefault(ENTRY if header[1] else header[2], [])
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            operands, attributes = _split_at_parenthesis(found[5])
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            current.append(
                Instruction(*found.group(2, 3, 4), names, operands, attributes, bool(found[1]))
            )
    return program


def _split_at_parenthesis(text: str) -> tuple[str, str]:
    """Return what is before and after the parenthesis that closes a list of operands."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""


def size(shape: str) -> int:
    """Return the bytes of an array, or of all arrays of a tuple.

    >>> size("(f32[2,3]{1,0}, bf16[4])")
    32
    """
    found = _ARRAY.findall(shape)
    return sum(
        SIZES[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in found
    )


def trips(program: Program, caller: str, loop: Instruction) -> int | None:
    """Return how often the body of a loop runs, or None if that is not a constant.

    XLA:GPU writes the number down. XLA:TPU does not, so it follows from the condition, i < n, and
    from the counter's first value and its step.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = {i.name: i for i in program.get(loop.named("condition") or "", [])}
    body = {i.name: i for i in program.get(loop.named("body") or "", [])}
    outside = {i.name: i for i in program[caller]}
    test = next((i for i in condition.values() if i.is_root), None)
    start = _constants_of_tuple(outside, loop.operands[0])
    if test is None or test.operation != "compare" or not {*test.operands} <= {*condition}:
        return None
    counter, limit = (_origin(condition, name) for name in test.operands)
    if counter is None or limit is None:
        return None
    place = _index(counter)
    last = start.get(_index(limit)) if limit.value is None else limit.value
    direction = re.search(r"direction=(\w+)", test.attributes)
    step = _step(body, place, start)
    if None in (place, last, step, start.get(place)) or direction is None:
        return None
    distance = last - start[place] + (direction[1] in ("LE", "GE")) * (1 if step > 0 else -1)
    return max(0, math.ceil(distance / step)) if direction[1] in _DIRECTIONS else None


_DIRECTIONS = ("LT", "LE", "GT", "GE", "NE")


def _index(instruction: Instruction) -> int | None:
    """Return which element of a tuple an instruction takes."""
    found = re.search(r"\bindex=(\d+)", instruction.attributes)
    return int(found[1]) if found and instruction.operation == "get-tuple-element" else None


def _origin(scope: dict[str, Instruction], name: str) -> Instruction | None:
    """Return the instruction that makes a value, without the copies on its way."""
    found = scope.get(name)
    while found is not None and found.operation in _COPIES:
        found = scope.get(found.operands[0])
    return found


_COPIES = ("copy", "bitcast", "convert", "copy-start", "copy-done")


def _constants_of_tuple(scope: dict[str, Instruction], name: str) -> dict[int | None, int]:
    """Return the elements of a tuple that are integer constants, by index."""
    source = _origin(scope, name)
    origins = [_origin(scope, operand) for operand in (source.operands if source else ())]
    return {n: x.value for n, x in enumerate(origins) if x is not None and x.value is not None}


def _step(body: dict[str, Instruction], place: int | None, start: dict[int | None, int]) -> Any:
    """Return the constant that a loop's body adds to its counter, or None."""
    root = next((i for i in body.values() if i.is_root and i.operation == "tuple"), None)
    after = _origin(body, root.operands[place]) if root and place is not None else None
    if after is None or after.operation != "add":
        return None
    terms = [x for name in after.operands if (x := _origin(body, name)) is not None]
    others = [x for x in terms if _index(x) != place]
    values = [start.get(_index(x)) if x.value is None else x.value for x in others]
    return values[0] if len(terms) == 2 and len(values) == 1 and values[0] else None


def _executed(
    program: Program, price: Callable[[Instruction], float], name: str = ENTRY, times: int = 1
) -> Iterator[tuple[Instruction, int]]:
    """Yield every instruction that runs, and how often; `price` decides between branches."""
    for instruction in program.get(name, []):
        if instruction.operation == "while":
            count = trips(program, name, instruction)
            body = instruction.named("body") or ""
            yield from _executed(program, price, body, times * (1 if count is None else count))
        elif instruction.operation == "conditional":
            runs = [list(_executed(program, price, b, times)) for b in instruction.branches]
            yield from max(runs, key=lambda run: sum(n * price(i) for i, n in run))
        elif instruction.operation == "call":
            yield from _executed(program, price, instruction.named("to_apply") or "", times)
        else:
            yield instruction, times


def loops(text: str) -> dict[str, int]:
    """Return how many loops a program has, and how many count once because nobody knows better."""
    program = parse(text)
    found = [
        trips(program, name, instruction)
        for name, part in program.items()
        for instruction in part
        if instruction.operation == "while"
    ]
    return {"loops": len(found), "unknown_loops": found.count(None)}


def unpriced(text: str) -> dict[str, int]:
    """Return what a TPU's cycles leave out: how many kernels, and the bytes that they move.

    The compiler prices no gathers, scatters and Cholesky factors, and no Pallas kernels.
    """
    program = parse(text)
    moved = _bytes_moved_in(program)
    found = [
        (instruction, times)
        for instruction, times in _executed(program, lambda instruction: instruction.cycles)
        if instruction.operation in ("fusion", "custom-call") and not instruction.cycles
        if not any(f'"{target}"' in instruction.attributes for target in _MARKS)
    ]
    total = sum(times * moved(instruction) for instruction, times in found)
    return {"unpriced_kernels": sum(times for _, times in found), "unpriced_bytes": total}


def unpriced_moves(text: str) -> int:
    """Return the bytes that unpriced changes of shape and updates in place move.

    A change of shape moves an array if tiles hold other entries before and after it.
    """
    program = parse(text)
    moved = _bytes_moved_in(program)
    run = _executed(program, lambda instruction: instruction.cycles)
    return sum(n * moved(i) for i, n in run if i.operation in _MOVES and not i.cycles)


_MOVES = ("reshape", "transpose", "reverse", "copy", "pad", "slice", "concatenate")
_MOVES += ("dynamic-slice", "dynamic-update-slice")

# Custom calls of XLA:TPU that do not run.
_MARKS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast")


def cycles(text: str) -> int:
    """Return the cycles of a program by the prices of a TPU's compiler."""
    run = _executed(parse(text), lambda instruction: instruction.cycles)
    return sum(times * instruction.cycles for instruction, times in run)


class Price(NamedTuple):
    """What one instruction costs in all its runs."""

    cycles: int
    times: int
    name: str
    shape: str
    op_name: str


def dearest(text: str, count: int = 40) -> list[Price]:
    """Return the instructions with the most cycles, those of loops with all their runs."""
    run = _executed(parse(text), lambda instruction: instruction.cycles)
    prices = [Price(n * i.cycles, n, i.name, i.shape, i.op_name) for i, n in run if i.cycles]
    return sorted(prices, reverse=True)[:count]


class Traffic(NamedTuple):
    """What a program's kernels move."""

    bytes: int
    kernels: int


def traffic(text: str) -> Traffic:
    """Return the bytes that all kernels read and write, and how often kernels run.

    A kernel reads its operands and writes its results. Of an array that it slices, or updates in
    place, it moves the slice alone. The scratch memory of library calls does not count.
    """
    program = parse(text)
    moved = _bytes_moved_in(program)
    run = [(i, n) for i, n in _executed(program, moved) if i.operation not in FREE]
    return Traffic(sum(n * moved(i) for i, n in run), sum(n for _, n in run))


def _bytes_moved_in(program: Program) -> Callable[[Instruction], int]:
    """Return a function that returns the bytes that an instruction of the program moves."""
    shapes = {i.name: i.shape for part in program.values() for i in part}

    def moved(instruction: Instruction) -> int:
        if instruction.operation in FREE:
            return 0
        fused = instruction.named("calls") if instruction.operation == "fusion" else None
        if fused in program:
            return _moved_by_fusion(program[fused])
        operands = [size(shapes.get(name, "")) for name in instruction.operands]
        return _moved(instruction.operation, operands, size(_without_scratch(instruction)))

    return moved


def _without_scratch(instruction: Instruction) -> str:
    """Return the type of the results without the scratch memory that libraries ask for."""
    if instruction.operation != "custom-call":
        return instruction.shape
    return re.sub(r", [su]8\[\d+\]\{0\}\)$", ")", instruction.shape)


def _moved(operation: str, operands: list[int], result: int) -> int:
    """Return the bytes that an instruction moves, which is a kernel of its own."""
    if operation in ("dynamic-slice", "gather", "slice"):
        return 2 * result + sum(operands[1:])
    if operation == "dynamic-update-slice":
        return 2 * operands[1] + sum(operands[2:])
    return sum(operands) + result


def _moved_by_fusion(body: list[Instruction]) -> int:
    """Return the bytes that a fusion moves: a slice of what it only slices, otherwise all."""
    own = {i.name: i for i in body}
    parameters = [i for i in body if i.operation == "parameter"]
    updates = {i.operands[0]: i for i in body if i.operation == "dynamic-update-slice"}
    total = 0
    for parameter in parameters:
        users = [i for i in body if parameter.name in i.operands]
        sliced = [i for i in users if i.operands[0] == parameter.name]
        if users and len(sliced) == len(users):
            if all(i.operation in ("dynamic-slice", "gather", "slice") for i in users):
                total += min(size(parameter.shape), sum(size(i.shape) for i in users))
                continue
            if parameter.name in updates and len(users) == 1:  # written in place
                continue
        total += size(parameter.shape)
    root = next((i for i in body if i.is_root), body[-1])
    results = [own[n] for n in root.operands if n in own] if root.operation == "tuple" else [root]
    for result in results:
        in_place = result.operation == "dynamic-update-slice" and result.operands[0] in own
        in_place = in_place and own[result.operands[0]].operation == "parameter"
        written = result.operands[1] if in_place else result.name
        total += size(own[written].shape) if written in own else size(result.shape)
    return total


class Collectives(NamedTuple):
    """The collectives of one kind: how many run, their bytes in all, and the largest one's."""

    count: int
    bytes: int
    largest: int


def collectives(text: str) -> dict[str, Collectives]:
    """Return what a program communicates, by kind of collective, in bytes of the whole array.

    An asynchronous collective stands in several fusions, all of which name the same channel. It
    counts once. XLA:TPU writes a reduce-scatter as a fusion of an all-reduce.
    """
    program = parse(text)
    shapes = {i.name: i.shape for part in program.values() for i in part}
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for instruction, times in _executed(program, lambda i: size(i.shape)):
        fused = instruction.named("calls") or ""
        for part in (instruction, *program.get(fused, [])):
            kind = part.operation.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            if fused.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            channel = re.search(r"channel_id=(\d+)", part.attributes)
            operands = sum(size(shapes.get(name, "")) for name in part.operands)
            whole = max(operands, 0 if part.operation.endswith("-start") else size(part.shape))
            if kind == "all-gather" and part.operation.endswith("-start"):
                whole = size(part.shape) - operands  # the type names operands and results
            found[kind, channel[1] if channel else part.name] = times, whole
    rows: dict[str, Collectives] = {}
    for (kind, _), (times, whole) in found.items():
        count, total, largest = rows.get(kind, (0, 0, 0))
        rows[kind] = Collectives(count + times, total + times * whole, max(largest, whole))
    return rows
